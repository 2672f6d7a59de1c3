from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from service_harness import Harness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    harness = Harness(tmp_path)
    await harness.start()
    yield harness
    await harness.stop()
