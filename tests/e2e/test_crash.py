"""Ranks and servers are killed under clients: nothing that was acknowledged is lost, and no client sees an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from descant.testing.crash import run

pytestmark = pytest.mark.crashes


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((), id="one rank"),
        pytest.param(("parallel.replicas=2",), id="two replicas"),
    ],
)
def test_kills_at_random_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    outcome = run(tmp_path, kills=6, minutes=None, seed=7, num_clients=2, settings=settings)
    assert outcome.kills == 6
    assert outcome.acknowledged >= 6
    assert (outcome.lost, outcome.errors) == (0, 0)
