"""CUDA graphs: work that is launched once, recorded, and launched again as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def record(compute: Callable[[], T], pool: Any) -> tuple[Any, T]:
    """The graph of what ``compute`` launches, and what it returns, whose memory is ``pool``'s. On the current stream,
    which is not the default one; what it needs once (workspaces, programs) has been made by a trial run.

    Not by ``torch.cuda.graph``, which first empties the allocator's cache and collects garbage: more than the rest."""
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process may go on allocating: they are no part of the graph.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        result = compute()
    finally:
        graph.capture_end()
    return graph, result
