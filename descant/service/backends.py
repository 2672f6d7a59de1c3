"""The base models that are served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from descant.errors import UserError
from descant.ports import Engine, Trainer
from descant.types import ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One served base model: who trains it and who samples it."""

    facts: ModelFacts
    trainer: Trainer
    engine: Engine


class Backends:
    """By the base's own name."""

    def __init__(self, backends: Sequence[Backend]):
        self._backends = {backend.facts.name: backend for backend in backends}
        self._bases = {name: b.facts.name for b in backends for name in (b.facts.name, *b.facts.aliases)}

    def __getitem__(self, base: str) -> Backend:
        return self._backends[base]

    def __iter__(self) -> Iterator[str]:
        return iter(self._backends)

    def served(self, base_model: str, *, of: str | None = None) -> str:
        """The base's own name, for it or an alias. ``of``: the checkpoint whose base it is, for the message."""
        if base_model in self._bases:
            return self._bases[base_model]
        served = ", ".join(repr(name) for name in self._backends)
        if of is not None:
            raise UserError(f"{of} was trained on {base_model!r}, which is not served here; served: {served}")
        raise UserError(f"base_model is {base_model!r}, which is not served here; served: {served}")
