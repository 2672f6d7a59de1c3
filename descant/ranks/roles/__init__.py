"""What a rank can be: a trainer, a sampler, or both, over one base model. Each role has handlers for its operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from descant.ranks.ops import Operation

Handlers = Mapping[type[Operation[Any]], Callable[[Any], Any]]


class RankRole(Protocol):
    def handlers(self) -> Handlers:
        """The operations that this role executes, on every rank alike: a handler agrees with the other ranks on the
        outcome (``ranks.agreement``) before it returns."""
        ...
