"""Seconds that the process is held up, by kind."""

from __future__ import annotations

import gc

import pytest
import torch

from descant import pauses


def test_what_is_nested_counts_once() -> None:
    before = pauses.spent_s()["build"]
    with pauses.paused("build"):
        with pauses.paused("build"), pytest.raises(ValueError, match="on the way"):
            raise ValueError("on the way")
        assert pauses.spent_s()["build"] == before, "it goes on"
    assert pauses.spent_s()["build"] > before


def test_collections_are_watched_once() -> None:
    for _ in range(2):
        pauses.watch_collections()
    assert gc.callbacks.count(pauses._on_collection) == 1
    before = dict(pauses.spent_s())
    gc.collect()
    assert pauses.spent_s()["gc"] > before["gc"]
    assert pauses.spent_s()["trim"] == before["trim"]


def test_what_the_compiler_does_is_watched() -> None:
    for _ in range(2):
        pauses.watch_compiler()
    before = pauses.spent_s()["build"]
    double = torch.compile(lambda x: x * 2, backend="eager")
    assert double(torch.ones(1)) == 2
    built = pauses.spent_s()["build"]
    assert built > before
    assert double(torch.ones(1)) == 2
    assert pauses.spent_s()["build"] == built, "it was compiled already"
