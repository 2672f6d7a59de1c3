"""A base whose layers are spread over ranks computes what it computes in one piece, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from descant.testing.gloo import Zygote
from descant.testing.tiny import tiny_model

pytestmark = pytest.mark.crashes


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote("tests.distributed.sharding")
    yield zygote
    zygote.close()


@pytest.mark.parametrize("arch", ["llama", "llama_tied", "qwen3", "gpt_neox", "gemma2"])
def test_a_sharded_base_equals_a_whole_one(zygote: Zygote, arch: str, tmp_path: Path) -> None:
    run = zygote.run("tests.distributed.sharding:alike", 2, str(tiny_model(arch, tmp_path)), limit_s=60.0)
    assert [outcome.error for outcome in run.outcomes] == [None, None]
    assert [outcome.failure for outcome in run.outcomes] == [None, None]
    for outcome in run.outcomes:
        told = outcome.value
        assert told["equal"]
        assert told["shards"]
        assert 0.4 * told["all"] < told["here"] < 0.6 * told["all"]
