"""The base models that are served."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from descant.errors import UserError
from descant.ports import Engine, Measured, Trainer
from descant.types import ModelFacts, Trainable, TrainableKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One served base model: who trains it and who samples it."""

    facts: ModelFacts
    trainer: Trainer
    engine: Engine

    @property
    def measured(self) -> Sequence[Measured]:
        """Those that are, once each: one object may be both."""
        parts = {id(part): part for part in (self.trainer, self.engine)}
        return [part for part in parts.values() if isinstance(part, Measured)]

    def check_trains(self, trainable: Trainable, *, of: str) -> None:
        """Raises ``UserError`` for a kind that its trainer does not train. ``of``: what is of it, for the message."""
        self._check(trainable, self.facts.trains, of=of, does="trains")

    def check_samples(self, trainable: Trainable, *, of: str) -> None:
        """Raises ``UserError`` for a kind that its engine does not sample."""
        self._check(trainable, self.engine.capabilities.samples, of=of, does="samples")

    def _check(self, trainable: Trainable, kinds: Collection[TrainableKind], *, of: str, does: str) -> None:
        if trainable.kind not in kinds:
            expected = " or ".join(repr(kind) for kind in sorted(kinds))
            raise UserError(
                f"{of} is of kind {trainable.kind!r}, expected {expected}: {self.facts.name} {does} no other"
            )


class Backends:
    """By the base's own name."""

    def __init__(self, backends: Sequence[Backend]):
        self._backends = {backend.facts.name: backend for backend in backends}
        self._bases = {name: b.facts.name for b in backends for name in (b.facts.name, *b.facts.aliases)}
        self._short = {name: b.facts.name for b in backends for name in b.facts.short_names}

    def __getitem__(self, base: str) -> Backend:
        return self._backends[base]

    def __iter__(self) -> Iterator[str]:
        return iter(self._backends)

    def served(self, base_model: str, *, of: str | None = None) -> str:
        """The base's own name, for any of its names. ``of``: the checkpoint whose base it is, for the message."""
        if base_model in self._bases:
            return self._bases[base_model]
        if base_model in self._short:
            return self._short[base_model]
        served = ", ".join(repr(name) for name in self._backends)
        if of is not None:
            raise UserError(f"{of} was trained on {base_model!r}, which is not served here; served: {served}")
        raise UserError(f"base_model is {base_model[:200]!r}, which is not served here; served: {served}")

    def sampled(self, base_model: str) -> str:
        """``served``, for a sampling client: it never asks what the base is called, and loads a tokenizer by the name
        that it was given itself."""
        base = self.served(base_model)
        if base_model not in self._bases:
            raise UserError(
                f"base_model is {base_model!r}, a short name by which a sampling client would find no tokenizer; "
                f"use {base!r}"
            )
        return base
