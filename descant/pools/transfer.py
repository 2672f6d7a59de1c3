"""A model's weights between replicas: in a private directory, for as long as they are read."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from descant.ckpt.manifest import MANIFEST, encode_manifest, write_durable
from descant.types import Manifest

TRANSFER = "transfer-"
"""So begin the names of these directories."""


@asynccontextmanager
async def transferred(
    save: Callable[[str], Awaitable[Manifest]], *, scratch: Path | None
) -> AsyncIterator[tuple[str, Manifest]]:
    """What ``save`` writes into the empty directory that it is given, with its manifest, inside the block.

    ``scratch``: a directory that all replicas can read; None: the system's."""
    directory = await asyncio.to_thread(tempfile.mkdtemp, dir=scratch, prefix=TRANSFER)
    try:
        manifest = await save(directory)
        await asyncio.to_thread(write_durable, Path(directory) / MANIFEST, encode_manifest(manifest))
        yield directory, manifest
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
