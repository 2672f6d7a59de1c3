from __future__ import annotations

from collections.abc import Iterator

import pytest

from descant.testing.gloo import Zygote


@pytest.fixture(scope="session")
def ranks() -> Iterator[Zygote]:
    """Ranks without torch."""
    zygote = Zygote("tests.distributed.agreements")
    yield zygote
    zygote.close()


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[Zygote]:
    zygote = Zygote("tests.distributed.programs")
    yield zygote
    zygote.close()
