"""One rank's hands: the base model with its learner, sampler and snapshots. Executes turns, decides nothing.

Where a replica has several ranks, each executes the same turns. Its adapters' rows are the same on all of them; its
gradient rows are what its own datums gave, until an optimiser step adds them up.

Everything runs on the turn loop's thread, except ``read`` and what ``save`` returns (files, no computation).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from descant.ckpt.files import CheckpointTensors, read_checkpoint
from descant.ckpt.snapshot import Snapshots, create_from, load_into
from descant.errors import DescantError, NotFound, ServerError, UserError
from descant.model.base import BaseModel
from descant.model.limit import matrix_rate
from descant.model.load import ModelSource, base_bytes, load_model, resolve_model
from descant.model.passes import PAGE_TOKENS
from descant.ranks.loop import Outcome, as_descant
from descant.ranks.peers import Peers
from descant.ranks.settings import LossSettings, RankSettings, RankSpec
from descant.ranks.turns import Microbatch, Rows, SampleStep
from descant.sample.drafter import NgramDrafter
from descant.sample.scheduler import SampleLimits, Scheduler, SequenceOutput, StepPlan
from descant.sample.step import Sampler
from descant.train.step import Contribution, Learner, RequestKey
from descant.types import (
    CheckpointSource,
    Command,
    CreateModel,
    Deleted,
    DeleteModel,
    EngineCapabilities,
    ForwardBackward,
    Loaded,
    LoadState,
    Manifest,
    ModelCreated,
    OptimStep,
    Refused,
    Result,
    Snapshot,
    SnapshotRef,
    Version,
)

log = logging.getLogger(__name__)

SHARD_ABOVE = 0.8
"""Of a device's memory: a base that takes more leaves no room for caches and activations."""


def build(spec: RankSpec, phase: Callable[[str], None], peers: Peers) -> Worker:
    """Loads the base model; each ``phase`` is told before it begins. Raises ``UserError`` for a model that cannot be
    served."""
    settings = spec.settings
    spill_dir = None if spec.spill_dir is None else Path(spec.spill_dir)
    if spill_dir is not None and peers.num_ranks > 1:
        spill_dir /= f"rank-{peers.rank}"
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    phase(f"finding the model {spec.model}")
    source = resolve_model(spec.model, cache_dir=None if spec.cache_dir is None else Path(spec.cache_dir))
    phase(f"loading {source.name} and checking it")
    shard = is_sharded(settings, source, peers)
    # A base that is sharded passes through the host's memory whole, once for each rank.
    at_once = peers.least("ranks that load at once", loads_at_once(source)) if shard else peers.num_ranks
    with peers.in_turns("loading", at_once=at_once):
        model = load_model(
            source,
            device=None if settings.device == "auto" else torch.device(settings.device),
            dtype={"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype],
            spill_dir=None if spill_dir is None else own_directory(spill_dir, source.name),
            max_version_bytes=settings.max_version_bytes,
            max_host_bytes=settings.max_host_bytes,
            compile=settings.compile,
            shard=peers.shard if shard else None,
        )
    phase("making the caches, capturing decode steps" if model.device.type == "cuda" else "making the caches")
    return Worker(model, settings, spec.losses, peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank has to say of a microbatch: requests that it could not open, and its share of those that close."""

    refused: Mapping[RequestKey, DescantError]
    contributions: Mapping[RequestKey, Contribution]


class Worker:
    """``Executor`` on a real model, for a rank that is alone; of several, rank 0's is a ``Team``."""

    num_ranks = 1
    idle_s: float | None = None

    def __init__(
        self,
        model: BaseModel,
        settings: RankSettings,
        losses: LossSettings | None = None,
        peers: Peers | None = None,
    ):
        peers = peers or Peers()
        self.facts = model.facts
        self._model = model
        self._settings = settings
        self._peers = peers
        self._learner = Learner(
            model,
            computed_as=losses.computed_as() if losses is not None else {},
            add_up=peers.add_up if peers.num_ranks > 1 else None,
            matrix_rate=matrix_rate(model.device, model.dtype, rounds=3),
        )
        if settings.max_adapter_bytes is not None:
            model.bank.max_adapter_bytes = settings.max_adapter_bytes
        # Alike on all ranks, so that they move the same adapters, and one plan of pages serves any of them.
        model.bank.max_adapter_bytes = peers.least("adapter bytes", model.bank.max_adapter_bytes)
        num_pages, max_running, self._step_tokens = sampling_sizes(model, settings)
        self._num_pages = peers.least("pages", num_pages)
        max_running = peers.least("running sequences", max_running)
        self.capabilities = EngineCapabilities(max_running=max_running)
        self._sampler = Sampler(
            model,
            num_pages=self._num_pages,
            max_rows=max_running,
            compile_decode=settings.compile is not False,
            deterministic=settings.deterministic,
        )
        self._sampler.warm_up()
        self.microbatch_tokens = peers.least("tokens of a pass", microbatch_tokens(model, settings))
        log.info(
            "room for %d adapters of rank 32 in training at once, %d tokens of keys and values, %d sequences; "
            "passes of %d tokens",
            model.bank.room_for(32),
            self._num_pages * PAGE_TOKENS,
            max_running,
            self.microbatch_tokens,
        )
        self._snapshots = Snapshots(model.bank, base=model.facts.name)
        self._published: set[Version] = set()
        self._held: set[RequestKey] = set()
        """Open requests: their adapters' rows stay where they are."""
        self._at_rest: tuple[torch.cuda.Event, int] | None = None
        """On CUDA, when all is done that the device was told by turns about training rows, and ``AdapterBank.moves``
        then. None after a turn that did not come to its end."""

    def make_scheduler(self) -> Scheduler:
        settings, facts = self._settings, self.facts
        limits = SampleLimits(
            max_running=self.capabilities.max_running,
            num_pages=self._num_pages,
            step_tokens=max(self._step_tokens, self._sampler.chunk_tokens or 1),
            chunk_tokens=self._sampler.chunk_tokens,
            max_waiting=settings.max_waiting,
            max_context_length=facts.max_context_length,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            max_num_samples=self.capabilities.max_num_samples,
            max_topk=self.capabilities.max_topk_prompt_logprobs,
            draft_tokens=settings.draft_tokens,
        )
        seeds = torch.Generator()
        seeds.seed()  # from the system's entropy: requests without a seed differ from run to run
        return Scheduler(
            limits,
            decode_text=self._decode_text,
            fresh_seed=lambda: int(torch.randint(0, 2**62, (), generator=seeds)),
            drafter=NgramDrafter() if settings.drafter == "ngram" else None,
        )

    def _decode_text(self, tokens: Sequence[int]) -> str:
        tokenizer = cast(PreTrainedTokenizerBase, self._model.tokenizer())
        return str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    # ------------------------------------------------------------------------------------------------ residency
    def adapter_bytes(self, model_id: str) -> tuple[int, int]:
        return self._model.bank.bytes_in_use(model_id)

    def max_adapter_bytes(self) -> float:
        return self._model.bank.max_adapter_bytes

    def is_resident(self, model_id: str) -> bool:
        return self._model.bank.is_resident(model_id)

    def prefetch(self, model_ids: Sequence[str], *, keep: Collection[str]) -> None:
        self._model.bank.prefetch(model_ids, keep=keep)

    def idle(self) -> None:
        """Nobody waits to hear that there is nothing to do."""

    def stats(self) -> dict[str, float]:
        """The bank's counts, bytes and times (``AdapterBank.stats``)."""
        return self._model.bank.stats()

    def _open(self, command: ForwardBackward) -> None:
        """Opens a request, its adapter's rows held. Raises ``DescantError``; a backward is remembered as lost then."""
        bank, key = self._model.bank, (command.model_id, command.seq_id)
        try:
            bank.hold(command.model_id)
        except ServerError as error:
            if not command.forward_only:
                self._learner.lose_gradient(key[0], f"forward_backward with seq_id {key[1]} failed: {error}")
            raise
        try:
            self._learner.open(command)
        except Exception:
            bank.let_go(command.model_id)
            raise
        self._held.add(key)

    def _let_go(self, keys: Iterable[RequestKey]) -> None:
        for key in [key for key in keys if key in self._held]:
            self._held.remove(key)
            self._model.bank.let_go(key[0])

    def _forget(self, model_id: str) -> None:
        """Its open requests and what the learner remembers of it."""
        self._learner.forget(model_id)
        self._let_go([key for key in self._held if key[0] == model_id])

    # ------------------------------------------------------------------------------------------------ turns
    def microbatch(self, turn: Microbatch) -> list[Outcome]:
        return self.finish_microbatch(turn, [self.begin_microbatch(turn)])

    def begin_microbatch(self, turn: Microbatch) -> Report:
        """Opens, and computes this rank's share. No gradient counts yet."""
        self._at_rest = None
        refused: dict[RequestKey, DescantError] = {}
        for command in turn.opens:
            key = (command.model_id, command.seq_id)
            try:
                self._open(command)
            except DescantError as error:
                refused[key] = error
        for parts in turn.shares[self._peers.rank]:
            self._learner.run([part for part in parts if part.request not in refused], backward=turn.backward)
        if turn.sampling:
            self._learner.land()
        return Report(
            refused=refused,
            contributions=self._learner.contributions([key for key in turn.closes if key not in refused]),
        )

    def finish_microbatch(self, turn: Microbatch, reports: Sequence[Report]) -> list[Outcome]:
        """Commits or discards, by what all ranks report: the worst outcome is everybody's."""
        outcomes: list[Outcome] = []
        refused = {key: error for report in reversed(reports) for key, error in report.refused.items()}
        for command in turn.opens:
            key = (command.model_id, command.seq_id)
            if key not in refused:
                continue
            if self._has(key[0]):
                self._learner.refuse(command, refused[key])
            self._let_go([key])
            outcomes.append(Outcome(key=key, result=refused[key]))
        for key in turn.closes:
            if key in refused:
                continue
            try:
                result = self._learner.close(key, [report.contributions[key] for report in reports])
            except DescantError as error:
                outcomes.append(Outcome(key=key, result=error))
            else:
                outcomes.append(Outcome(key=key, result=result))
        self._let_go(turn.closes)
        self._come_to_rest()
        return outcomes

    def _come_to_rest(self) -> None:
        if self._model.device.type == "cuda":
            self._at_rest = torch.cuda.current_stream(self._model.device).record_event(), self._model.bank.moves

    def sample_step(self, turn: SampleStep) -> list[Sequence[SequenceOutput] | DescantError | None]:
        return [self.sample(plan) for plan in turn.plans]

    def sample(self, plan: StepPlan | None) -> Sequence[SequenceOutput] | DescantError | None:
        """``plan`` None: another rank has one, maybe."""
        if plan is None:
            if self._model.sharded:
                self._model.empty_pass(backward=False)
            return None
        try:
            return self._sampler.step(plan)
        except Exception as error:
            if self._model.sharded:  # it may have left a pass that others are in
                raise
            return as_descant(error)

    def in_order(self, commands: Sequence[Command]) -> tuple[Command, ...]:
        """Those whose rows are here first, others may have to move them out: the first of each model, then the second,
        optimiser steps beside one another (``_hold_steps``). Then the others, model by model, so that none is brought
        twice. Each model's own order stays."""
        places: list[tuple[bool, int, int]] = []
        seen: Counter[str] = Counter()
        order: dict[str, int] = {}
        for command in commands:
            model_id = command.model_id
            nth, which = seen[model_id], order.setdefault(model_id, len(order))
            if self._model.bank.is_resident(model_id):
                places.append((False, nth, not isinstance(command, OptimStep)))
            else:
                places.append((True, which, nth))
            seen[model_id] += 1
        return tuple(commands[index] for index in sorted(range(len(commands)), key=places.__getitem__))

    def rows(self, turn: Rows) -> list[Outcome]:
        return self.run_rows(replace(turn, commands=self.in_order(turn.commands)))

    def run_rows(self, turn: Rows) -> list[Outcome]:
        """In the turn's order. Optimiser steps that stand together are made together."""
        at_rest, self._at_rest = self._at_rest, None
        outcomes: list[Outcome] = []
        while len(outcomes) < len(turn.commands):
            left = turn.commands[len(outcomes) :]
            command, key = left[0], (left[0].model_id, left[0].seq_id)
            results: Sequence[Result | Exception]
            try:
                if isinstance(command, OptimStep):
                    results = self._optim_steps(left, at_rest)
                else:
                    results = [self._row(command, turn.loaded.get(key))]
            except Exception as error:
                results = [error]
            at_rest = None
            for command, result in zip(left, results):
                ended = as_descant(result) if isinstance(result, Exception) else result
                outcomes.append(Outcome(key=(command.model_id, command.seq_id), result=ended))
        self._come_to_rest()
        return outcomes

    def _row(self, command: Command, loaded: CheckpointTensors | DescantError | None) -> Result:
        if isinstance(loaded, DescantError):
            raise loaded
        bank, model_id = self._model.bank, command.model_id
        match command:
            case CreateModel():
                return self._create(command, loaded)
            case OptimStep():
                raise AssertionError("optimiser steps are made together")
            case Snapshot():
                pending = self._learner.has_pending_gradient(model_id)
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
            case Refused():
                if command.loses_gradient and self._has(model_id):
                    why = f"request with seq_id {command.seq_id} was refused: {command.message}"
                    self._learner.lose_gradient(model_id, why)
                raise UserError(command.message)
            case ForwardBackward():  # one without data: the learner refuses it, and remembers
                self._open(command)
                try:
                    return self._learner.close((model_id, command.seq_id))
                finally:
                    self._let_go([(model_id, command.seq_id)])

    def _optim_steps(
        self, commands: Sequence[Command], at_rest: tuple[torch.cuda.Event, int] | None
    ) -> list[Result | Exception]:
        """The outcomes of as many of the first as can be made together, at least one. ``at_rest``: as long as nothing
        has moved since, they need not wait for a step that the sampler is ahead with.

        Where ranks add their gradients up, an error that is not the same on all of them leaves the others waiting: it
        is the end of the replica."""
        steps = self._hold_steps(commands)
        try:
            there = at_rest[0] if at_rest is not None and at_rest[1] == self._model.bank.moves else None
            outcomes = self._learner.optim_steps([(step.model_id, step.adam_params) for step in steps], there=there)
        except Exception as error:
            outcomes = [error] * len(steps)
        finally:
            for step in steps:
                self._model.bank.let_go(step.model_id)
        return [
            self._alone(step, outcome)
            if isinstance(outcome, Exception) and not isinstance(outcome, DescantError)
            else outcome
            for step, outcome in zip(steps, outcomes, strict=True)
        ]

    def _hold_steps(self, commands: Sequence[Command]) -> list[OptimStep]:
        """The optimiser steps of different models that stand at the head, the first and of the others those whose rows
        are here: none is brought back at the expense of what is held. They are held."""
        bank = self._model.bank
        held: dict[str, OptimStep] = {}
        for command in commands:
            if not isinstance(command, OptimStep) or command.model_id in held:
                break
            if held and not bank.is_resident(command.model_id):
                break
            try:
                bank.hold(command.model_id)  # before the learner forgets why a gradient was lost
            except ServerError as error:
                if held:
                    break
                raise self._alone(command, error) from error
            held[command.model_id] = command
        return list(held.values())

    def _alone(self, command: Command, error: Exception) -> Exception:
        if self._peers.num_ranks == 1:
            return error
        return self._peers.over(f"{type(command).__name__} of model {command.model_id}", error)

    def _create(self, command: CreateModel, loaded: CheckpointTensors | None) -> ModelCreated:
        bank, model_id = self._model.bank, command.model_id
        if self._has(model_id):
            raise UserError(f"model {model_id} exists already")
        self._forget(model_id)
        adapter = bank.create(model_id, command.lora) if loaded is None else create_from(bank, model_id, loaded)
        return ModelCreated(model_id=model_id, lora=adapter.lora, step=adapter.step)

    def _has(self, model_id: str) -> bool:
        try:
            return self._model.bank[model_id] is not None
        except NotFound:
            return False

    def fail(self, key: RequestKey, command: Command, why: str) -> None:
        if not isinstance(command, ForwardBackward):
            return
        self._learner.abandon(key)
        self._let_go([key])
        if not command.forward_only and self._has(key[0]):
            self._learner.lose_gradient(key[0], f"forward_backward with seq_id {key[1]} failed: {why}")

    # ------------------------------------------------------------------------------------------------ snapshots
    def read(self, source: CheckpointSource) -> CheckpointTensors:
        return read_checkpoint(source)

    def save(self, ref: SnapshotRef, dest: str) -> Callable[[], Manifest]:
        return self._snapshots.save(ref, dest)

    def drop(self, ref: SnapshotRef) -> None:
        self._snapshots.drop(ref)

    # ------------------------------------------------------------------------------------------------ versions
    def publish(self, ref: SnapshotRef, loaded: CheckpointTensors | None) -> None:
        self._snapshots.publish(ref, loaded)
        self._published.add(ref.version)

    def is_published(self, version: Version) -> bool:
        return version in self._published

    def release_version(self, version: Version) -> None:
        self._published.discard(version)
        self._model.bank.release(version)

    def acquire(self, version: Version | None, count: int = 1) -> None:
        if version is not None and version not in self._published:
            raise NotFound(f"version {version.number} of model {version.model_id} was never published, or was released")
        self._sampler.acquire(version, count)

    def free(self, version: Version | None, count: int = 1) -> None:
        self._sampler.release(version, count)


def is_sharded(settings: RankSettings, source: ModelSource, peers: Peers) -> bool:
    """As the setting says; without one, whether the base fits any rank's device with room for what it works on. Raises
    ``UserError`` when it is to be sharded over one rank."""
    if settings.shard_base is not None:
        if settings.shard_base and peers.num_ranks == 1:
            raise UserError("rank.shard_base is true and rank.ranks_per_replica is 1, expected several ranks")
        return settings.shard_base
    if peers.num_ranks == 1:
        return False
    fits = True
    if settings.device != "cpu" and torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        fits = base_bytes(source) <= SHARD_ABOVE * total
    return peers.least("whether the base fits", int(fits)) == 0


LOADED = 1.3
"""Of the base's files: what one that is loaded and checked takes of the host's memory."""


def loads_at_once(source: ModelSource) -> int:
    """How many ranks of this machine may have the whole base in the host's memory; one at least."""
    return max(1, int(min(host_bytes() / (LOADED * max(1, base_bytes(source))), 1 << 16)))


def host_bytes() -> float:
    """What is free of the host's memory, and of what this process's group may have of it; infinite where Linux does not
    say."""
    free = math.inf
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
        free = min(free, int((group / "memory.max").read_text()) - used)  # "max": no limit
    return free


def own_directory(parent: Path, name: str) -> Path:
    """A base's own: what a bank finds in its directory it takes for an earlier life's and removes."""
    return parent / hashlib.sha256(name.encode()).hexdigest()[:16]


STEP_TOKENS = {"cpu": 512, "cuda": 4096}
MAX_RUNNING = {"cpu": 64, "cuda": 256}
RUNNING_TOKENS = 512
"""Room in the pages for each sequence that decodes on a CUDA device, at least: with less, they would push one another
out more than they decode."""


def sampling_sizes(model: BaseModel, settings: RankSettings) -> tuple[int, int, int]:
    """Pages (what ``kv_bytes`` pays for, no more than all running sequences could fill), sequences decoding at once,
    prompt tokens of a step."""
    kind = "cuda" if model.device.type == "cuda" else "cpu"
    paid = kv_bytes(settings, model) // (model.kv_bytes_per_token() * PAGE_TOKENS)
    max_running = settings.max_running
    if max_running is None:
        max_running = MAX_RUNNING[kind]
        if kind == "cuda":
            max_running = max(1, min(max_running, paid * PAGE_TOKENS // RUNNING_TOKENS))
    longest = -(-model.facts.max_context_length // PAGE_TOKENS)
    step_tokens = STEP_TOKENS[kind] if settings.step_tokens is None else settings.step_tokens
    return max(2, min(paid, longest * max_running)), max_running, step_tokens


PASS_TOKENS = (2048, 4096, 8192, 16384)
"""Larger ones gain little, and a sampled token waits for one."""


def microbatch_tokens(model: BaseModel, settings: RankSettings) -> int:
    """Once the pages are taken: what adapters may take beside them is not there for activations."""
    if settings.microbatch_tokens is not None:
        return settings.microbatch_tokens
    if model.activations is None or model.device.type != "cuda":
        return PASS_TOKENS[0]
    return model.activations.tokens_that_fit(model.free_bytes() - model.bank.max_adapter_bytes, PASS_TOKENS)


def kv_bytes(settings: RankSettings, model: BaseModel) -> int:
    if settings.kv_bytes is not None:
        return settings.kv_bytes
    if model.device.type != "cuda":
        return 1 << 30
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(0, free - model.bank.max_adapter_bytes) * 2 // 5
