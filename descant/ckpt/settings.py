"""Where checkpoints are kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    url: str | None = None
    """An object store: ``s3://bucket/prefix``, ``gs://…``, ``az://…``. None: the data directory."""
