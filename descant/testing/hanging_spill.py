"""A directory for what is offloaded, on a disk that hangs or fails when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from descant.adapters.offload import SpillDirectory
from descant.errors import CannotStore


class HangingSpill(SpillDirectory):
    """``goes_on``: cleared, a write that begins does not end until it is set. ``begun``: one has. ``fails``: writes do,
    though there is room."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.goes_on, self.begun = threading.Event(), threading.Event()
        self.goes_on.set()
        self.fails = False

    def write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Path:
        self.begun.set()
        assert self.goes_on.wait(60)
        if self.fails:
            raise CannotStore("the data directory cannot be written: its disk reports an error")
        return super().write(name, tensors)
