"""``descant bench`` on a tiny model: every measurement runs, and its row says what the documents promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from descant import bench
from descant.cli import main
from descant.testing.tiny import tiny_model

FIELDS = {"id", "what", "value", "unit", "baseline", "ratio", "roofline", "fraction_of_roofline", "device", "torch"}


def test_every_measurement_makes_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(bench, "ROUNDS", 1)
    model = tiny_model("llama", tmp_path / "llama")
    result = CliRunner().invoke(main, ["bench", "--model", str(model), "--json", str(tmp_path / "rows.json")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["id"] for row in rows] == list(bench.MEASUREMENTS)
    for row in rows:
        assert set(row) == FIELDS
        assert row["ratio"] == pytest.approx(row["value"] / row["baseline"])
        assert row["fraction_of_roofline"] == pytest.approx(row["value"] / row["roofline"])
        assert row["id"] in result.output
