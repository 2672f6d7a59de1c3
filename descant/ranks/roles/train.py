"""The role that trains: opens and closes requests, runs their datums, and commands that change whole rows.

Adapters' rows are the same on all ranks; a rank's gradient rows are what its own datums gave, until an optimiser step
adds them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from descant.ckpt.files import CheckpointTensors
from descant.ckpt.snapshot import Snapshots, create_from, load_into
from descant.errors import DescantError, NotFound, ServerError, UserError
from descant.model.base import BaseModel
from descant.model.flops import measure_peak_flops
from descant.ranks.agreement import gather_outcomes, require_agreement
from descant.ranks.executor import to_descant_error
from descant.ranks.ops import Background, Drop, Fail, Microbatch, Outcome, Prefetch, Rows, Save
from descant.ranks.peers import Peers
from descant.ranks.roles import Handlers
from descant.ranks.settings import LossSettings
from descant.train.passes import TorchPassRunner
from descant.train.requests import Learner
from descant.train.results import Contribution
from descant.train.runner import RequestKey
from descant.types import (
    Command,
    CreateModel,
    Deleted,
    DeleteModel,
    ForwardBackward,
    Loaded,
    LoadState,
    Lora,
    Manifest,
    ModelCreated,
    OptimStep,
    Rejected,
    Result,
    Snapshot,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchReport:
    """One rank's report of a microbatch: requests that it could not open, and its share of those that close."""

    refused: Mapping[RequestKey, DescantError]
    contributions: Mapping[RequestKey, Contribution]


class TrainRole:
    def __init__(
        self,
        model: BaseModel,
        snapshots: Snapshots,
        peers: Peers,
        *,
        losses: LossSettings | None,
        learner: type[Learner] = Learner,
    ):
        """``learner``: what the requests are kept and committed with."""
        self._model, self._snapshots, self._peers = model, snapshots, peers
        self._runner = TorchPassRunner(model, all_reduce=peers.all_reduce_sum if peers.num_ranks > 1 else None)
        self.learner = learner(
            self._runner,
            computed_as=losses.computed_as() if losses is not None else {},
            peak_flops=measure_peak_flops(model.device, model.dtype, rounds=3),
        )
        self._pinned: set[RequestKey] = set()
        """Open requests: their adapters' rows stay where they are."""
        self._rows_ready: tuple[torch.cuda.Event, int] | None = None
        """On CUDA, recorded when all work that turns about training rows have issued is done, and
        ``AdapterBank.generation`` then. None after a turn that did not come to its end."""

    def warm_up(self) -> None:
        """Once all that is there from the start has its memory."""
        self._runner.warm_up()

    def handlers(self) -> Handlers:
        return {
            Microbatch: self.microbatch,
            Rows: self.rows,
            Prefetch: lambda op: self._model.bank.prefetch(op.model_ids, keep=op.keep),
            Fail: self.fail,
            Save: self.save,
            Drop: lambda op: self._snapshots.drop(op.ref),
        }

    # ------------------------------------------------------------------------------------------------ microbatches
    def microbatch(self, op: Microbatch) -> list[Outcome]:
        reports: list[MicrobatchReport] = []
        for report in gather_outcomes(self._peers, "reports", lambda: self.begin(op)):
            if isinstance(report, DescantError):  # outside any request: all ranks abandon what was in it
                raise report
            reports.append(report)
        try:
            return self._commit(op, reports)
        except Exception as error:  # others have committed
            raise self._peers.failed_here("a commit", error) from error

    def begin(self, op: Microbatch) -> MicrobatchReport:
        """Opens, and computes this rank's share. No gradient counts yet."""
        self._rows_ready = None
        refused: dict[RequestKey, DescantError] = {}
        for command in op.opens:
            key = (command.model_id, command.seq_id)
            try:
                self.open(command)
            except DescantError as error:
                refused[key] = error
        for parts in op.shares[self._peers.rank]:
            self.learner.run([part for part in parts if part.request not in refused], backward=op.backward)
        if op.sampling:
            self.learner.wait()
        return MicrobatchReport(
            refused=refused,
            contributions=self.learner.contributions([key for key in op.closes if key not in refused]),
        )

    def _commit(self, op: Microbatch, reports: Sequence[MicrobatchReport]) -> list[Outcome]:
        """Commits or discards, by what all ranks report: the worst outcome holds for all."""
        outcomes: list[Outcome] = []
        refused = {key: error for report in reversed(reports) for key, error in report.refused.items()}
        for command in op.opens:
            key = (command.model_id, command.seq_id)
            if key not in refused:
                continue
            if self._has(key[0]):
                self.learner.refuse(command, refused[key])
            self._unpin([key])
            outcomes.append(Outcome(key=key, result=refused[key]))
        for key in op.closes:
            if key in refused:
                continue
            try:
                result = self.learner.close(key, [report.contributions[key] for report in reports])
            except DescantError as error:
                outcomes.append(Outcome(key=key, result=error))
            else:
                outcomes.append(Outcome(key=key, result=result))
        self._unpin(op.closes)
        self._record_rows_ready()
        return outcomes

    def open(self, command: ForwardBackward) -> None:
        """Opens a request and pins its adapter. Raises ``DescantError``; a backward is remembered as lost then."""
        bank, key = self._model.bank, (command.model_id, command.seq_id)
        try:
            self.pin(command.model_id)
        except ServerError as error:
            if not command.forward_only:
                self.learner.poison(key[0], f"forward_backward with seq_id {key[1]} failed: {error}")
            raise
        try:
            self.learner.open(command)
        except Exception:
            bank.unpin_adapter(command.model_id)
            raise
        self._pinned.add(key)

    def pin(self, model_id: str) -> None:
        """Loads the adapter's rows onto the device, where they stay until they are unpinned. Raises ``ServerError``."""
        self._model.bank.pin_adapter(model_id)

    def _unpin(self, keys: Iterable[RequestKey]) -> None:
        for key in [key for key in keys if key in self._pinned]:
            self._pinned.remove(key)
            self._model.bank.unpin_adapter(key[0])

    def fail(self, op: Fail) -> None:
        if not isinstance(op.command, ForwardBackward):
            return
        model_id, seq_id = op.key
        self.learner.abandon(op.key)
        self._unpin([op.key])
        if not op.command.forward_only and self._has(model_id):
            self.learner.poison(model_id, f"forward_backward with seq_id {seq_id} failed: {op.why}")

    # ------------------------------------------------------------------------------------------------ rows
    def rows(self, op: Rows) -> list[Outcome]:
        """In the operation's order. Optimiser steps that stand together are made together."""
        rows_ready, self._rows_ready = self._rows_ready, None
        outcomes: list[Outcome] = []
        while len(outcomes) < len(op.commands):
            left = op.commands[len(outcomes) :]
            command, key = left[0], (left[0].model_id, left[0].seq_id)
            results: Sequence[Result | Exception]
            try:
                if isinstance(command, OptimStep):
                    results = self._optim_steps(left, rows_ready)
                else:
                    results = [self.row(command, op.loaded.get(key))]
            except Exception as error:
                results = [error]
            rows_ready = None
            for command, result in zip(left, results):
                ended = to_descant_error(result) if isinstance(result, Exception) else result
                outcomes.append(Outcome(key=(command.model_id, command.seq_id), result=ended))
        self._record_rows_ready()
        names = [f"{type(command).__name__} of model {command.model_id}" for command in op.commands]
        errors = [outcome.result if isinstance(outcome.result, DescantError) else None for outcome in outcomes]
        require_agreement(self._peers, names, errors)
        self._peers.check()
        return outcomes

    def row(self, command: Command, loaded: CheckpointTensors | DescantError | None) -> Result:
        if isinstance(loaded, DescantError):
            raise loaded
        bank, model_id = self._model.bank, command.model_id
        match command:
            case CreateModel():
                return self._create(command, loaded)
            case OptimStep():
                raise AssertionError("optimiser steps are made together")
            case Snapshot():
                pending = self.learner.has_pending_gradient(model_id)
                return self._snapshots.take(command, has_pending_gradient=pending)
            case LoadState():
                if loaded is None:
                    raise ServerError(f"the checkpoint {command.source.uri} was not read")
                load_into(bank, model_id, loaded)
                self._forget(model_id)
                return Loaded(model_id=model_id, uri=command.source.uri, step=bank[model_id].step)
            case DeleteModel():
                self._forget(model_id)
                bank.delete(model_id)
                return Deleted(model_id=model_id)
            case Rejected():
                if command.poisons_gradient and self._has(model_id):
                    why = f"request with seq_id {command.seq_id} was refused: {command.message}"
                    self.learner.poison(model_id, why)
                raise UserError(command.message)
            case ForwardBackward():  # one without data: the learner refuses it, and remembers
                self.open(command)
                try:
                    return self.learner.close((model_id, command.seq_id))
                finally:
                    self._unpin([(model_id, command.seq_id)])

    def _optim_steps(
        self, commands: Sequence[Command], rows_ready: tuple[torch.cuda.Event, int] | None
    ) -> list[Result | Exception]:
        """The outcomes of as many of the first as can be made together, at least one. ``rows_ready``: as long as
        nothing has moved since, they need not wait for a step that the sampler is ahead with.

        Where gradients are all-reduced, an error that is not the same on all of them leaves the others waiting: it
        is the end of the replica."""
        steps = self._pin_steps(commands)
        try:
            gradients_ready = (
                rows_ready[0] if rows_ready is not None and rows_ready[1] == self._model.bank.generation else None
            )
            outcomes = self.learner.optim_steps(
                [(step.model_id, step.adam_params) for step in steps], gradients_ready=gradients_ready
            )
        except Exception as error:
            outcomes = [error] * len(steps)
        finally:
            for step in steps:
                self._model.bank.unpin_adapter(step.model_id)
        return [
            self._failed_here(step, outcome)
            if isinstance(outcome, Exception) and not isinstance(outcome, DescantError)
            else outcome
            for step, outcome in zip(steps, outcomes, strict=True)
        ]

    def _pin_steps(self, commands: Sequence[Command]) -> list[OptimStep]:
        """The optimiser steps of different models that stand at the head, the first and of the others those whose rows
        are here: none is loaded at the expense of what is pinned. They are pinned."""
        bank = self._model.bank
        pinned: dict[str, OptimStep] = {}
        for command in commands:
            if not isinstance(command, OptimStep) or command.model_id in pinned:
                break
            if pinned and not bank.is_resident(command.model_id):
                break
            try:
                self.pin(command.model_id)  # before the learner forgets why a gradient was lost
            except ServerError as error:
                if pinned:
                    break
                raise self._failed_here(command, error) from error
            pinned[command.model_id] = command
        return list(pinned.values())

    def _failed_here(self, command: Command, error: Exception) -> Exception:
        return self._peers.failed_here(f"{type(command).__name__} of model {command.model_id}", error)

    def _create(self, command: CreateModel, loaded: CheckpointTensors | None) -> ModelCreated:
        bank, model_id = self._model.bank, command.model_id
        if self._has(model_id):
            raise UserError(f"model {model_id} exists already")
        trainable = command.trainable if loaded is None else loaded.lora
        if not isinstance(trainable, Lora):
            raise UserError(f"model {model_id} is of kind {trainable.kind!r}, expected {Lora.kind!r}")
        self._forget(model_id)
        adapter = bank.create(model_id, trainable) if loaded is None else create_from(bank, model_id, loaded)
        return ModelCreated(model_id=model_id, trainable=adapter.lora, step=adapter.step)

    def _forget(self, model_id: str) -> None:
        """Its open requests and what the learner remembers of it."""
        self.learner.forget(model_id)
        self._unpin([key for key in self._pinned if key[0] == model_id])

    def _has(self, model_id: str) -> bool:
        try:
            return self._model.bank[model_id] is not None
        except NotFound:
            return False

    def _record_rows_ready(self) -> None:
        if self._model.device.type == "cuda":
            self._rows_ready = torch.cuda.current_stream(self._model.device).record_event(), self._model.bank.generation

    # ------------------------------------------------------------------------------------------------ snapshots
    def save(self, op: Save) -> Background[Manifest]:
        """Raises ``NotFound`` now, or writes behind the turns: this thread does nothing for it."""
        return Background(run=self._snapshots.save(op.ref, op.dest))
