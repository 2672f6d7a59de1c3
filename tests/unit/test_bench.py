"""``descant bench`` on a tiny model: every measurement runs, and its row says what the documents promise. And how
``bench/load.py`` counts."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from descant import bench
from descant.cli import main
from descant.testing.tiny import tiny_model

FIELDS = {"id", "what", "value", "unit", "baseline", "ratio", "roofline", "fraction_of_roofline", "device", "torch"}


def test_every_measurement_makes_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("peft")
    pytest.importorskip("tinker")
    monkeypatch.setattr(bench, "ROUNDS", 1)
    small = ("--clients", "2", "--seconds", "1", "--samples", "2", "--tokens", "8")
    monkeypatch.setattr(bench, "LOAD_OPTIONS", small)
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


# --------------------------------------------------------------------------------------------------------------------
# The real load


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("load", bench.LOAD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "load", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


OPTIONS = argparse.Namespace(samples=4, tokens=10, think=0.0)


def test_the_load_counts_by_its_share_what_crosses_an_edge_of_the_window(load: ModuleType):
    calls = [
        load.Call(0, 2, "sample", 8.0, 12.0, 40, 0.4),  # half of it
        load.Call(0, 2, "forward_backward", 12.0, 15.0, 90, 0.0),
        load.Call(0, 2, "optim_step", 15.0, 15.5, 0, 0.0),
        load.Call(0, 2, "save", 15.5, 16.0, 0, 0.0),
        load.Call(0, 3, "sample", 16.0, 19.0, 40, 0.3),
        load.Call(0, 3, "forward_backward", 19.0, 22.0, 90, 0.0),  # a third
        load.Call(1, 0, "sample", 1.0, 9.0, 40, 0.8),  # nothing
    ]
    before = {"rounds": 1.0, "steps": 1.0, "sampled": 40.0, "trained": 90.0, "computed": 60.0, "linear": 2.0}
    before |= {"sample": 1.0, "forward_backward": 3.0, "optim_step": 0.5, "save": 0.0}
    after = {**before, "optim_step": 0.0, "save": 0.25}
    window = load.Window(
        clients=1,
        calls=calls,
        start=10.0,
        end=20.0,
        busy=[],
        cores={},
        numbers={"versions_resident": 7.0, "models": 1.0},
        new=[],
        floors=(before, after),
    )
    rows = {row["id"]: row for row in load.rows_of(window, OPTIONS)}
    sampled, trained, done = 60.0, 120.0, (1.5 + 4 / 3 + 1 + 1) / 4
    seconds = sampled * 2 / 80 + trained * 6 / 180 + 0.25 + 0.125
    for id, value, baseline in (
        ("load_vs_lockstep@1", seconds, 10.0),
        ("sampled_tokens_per_s@1", sampled / 10, sampled / seconds),
        ("trained_tokens_per_s@1", trained / 10, trained / seconds),
        ("steps_per_s@1", done / 10, done / seconds),
        ("step_p50_s@1", 8.0, 8.75 / 2),
        ("sample_p50_s@1", 3.5, 1.0),
        ("lockstep_linear_s@1", 2.0, 8.75 / 2),
    ):
        assert (rows[id]["value"], rows[id]["baseline"]) == pytest.approx((value, baseline)), id
        assert rows[id]["ratio"] == pytest.approx(value / baseline), id
    assert rows["first_step_ratio@1"]["value"] is rows["device_busy@1"]["value"] is None
    assert rows["versions_resident@1"]["value"] == 7.0
    assert "models@1" not in rows


def test_the_load_is_drawn_from_its_seeds_and_lockstep_trains_what_clients_train(load: ModuleType):
    text = list(range(100, 200))
    works = [load.work_of(OPTIONS, text, number, 5) for number in range(4)]
    assert works == [load.work_of(OPTIONS, text, number, 5) for number in range(4)]
    assert len({tuple(work.prompt) for work in works}) == 4
    samples = [([7, 8, 9], [-0.1, -0.2, -0.3])] * 4
    reinforced, loss = load.training_data(works[0], samples)
    ahead = len(works[0].prompt) - 1
    assert loss == "importance_sampling"
    assert [tokens for tokens, _ in reinforced] == [[*works[0].prompt, 7, 8]] * 4
    assert sum(arrays["advantages"][-1] for _, arrays in reinforced) == pytest.approx(0.0, abs=1e-6)
    for tokens, arrays in reinforced:
        assert {len(array) for array in arrays.values()} == {len(tokens)}
        assert arrays["target_tokens"].tolist() == [*works[0].prompt[1:], 7, 8, 9]
        assert not arrays["advantages"][:ahead].any()
    learned, loss = load.training_data(works[3], samples)
    assert (loss, len(learned)) == ("cross_entropy", 4)
    assert all(arrays["target_tokens"][:-1].tolist() == tokens[1:] for tokens, arrays in learned)
