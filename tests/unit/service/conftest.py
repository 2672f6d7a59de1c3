from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from service_harness import Harness


@pytest.fixture(params=[False, True], ids=["together", "apart"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    """Over a trainer and an engine that share rows, and over two that share nothing."""
    harness = Harness(tmp_path, apart=request.param)
    await harness.start()
    yield harness
    await harness.stop()
