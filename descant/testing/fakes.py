"""Small real implementations of Trainer, Engine and CheckpointStore: numpy, one event loop, no threads.

``FakeWorld`` is a base model of one table (the logits of the next token given the last one) and any number of models
on it: rank-r adapters, ``logits[prev] = base[prev] + (32 / r) · (B A)[prev]``, and full ones, each a table of its own.
Losses, gradients, AdamW and sampling are real, so what is trained can be sampled, saved, loaded and compared.

    world = FakeWorld()
    backend = Backend(facts=world.facts, trainer=FakeTrainer(world), engine=FakeEngine(world))

``FakeWorld(hook=…)`` is for tests of what happens meanwhile: it is awaited before each command, save, publication and
sample with that thing as its argument, and may wait (an ``asyncio.Event``) or raise (then that thing fails).
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from descant.ckpt.manifest import (
    MANIFEST,
    check_file,
    damaged,
    encode_manifest,
    read_manifest,
    read_verified,
    write_durable,
)
from descant.ckpt.peft import ADAPTER, ADAPTER_CONFIG, OPTIMIZER, ExportBase, adapter_config
from descant.errors import Damaged, DescantError, NotFound, Overloaded, ServerError, UserError
from descant.sample.check import check_scores
from descant.sample.scores import empty_topk, fill_topk
from descant.storage import cannot_store
from descant.testing.fake_model import Array, FakeAdapter, Weights, compute, logprobs, take_step
from descant.train.check import check_adam, check_forward_backward, loss_fn_config
from descant.types import (
    MAX_RANK,
    Checkpoint,
    CheckpointName,
    CheckpointSource,
    Command,
    CreateModel,
    Deleted,
    DeleteModel,
    EncodedText,
    EngineCapabilities,
    ForwardBackward,
    ForwardBackwardOutput,
    Int32,
    Loaded,
    LoadState,
    Lora,
    Manifest,
    ModelCreated,
    ModelFacts,
    OptimStep,
    OptimStepOutput,
    PromptAltTokens,
    PromptScores,
    Rejected,
    Result,
    SampleDelta,
    SampleRequest,
    Snapshot,
    SnapshotRef,
    StopReason,
    TopK,
    Trainable,
    TrainableKind,
    Version,
    input_length,
    input_tokens,
    same_shape,
)

Hook = Callable[[object], Awaitable[None]]

FAKE_BASE = "fake/bigram"
WEIGHTS: Mapping[TrainableKind, str] = {"lora": ADAPTER, "full": "model.safetensors"}
"""The file of a model's weights, by its kind."""
TENSORS: Mapping[TrainableKind, tuple[str, ...]] = {
    "lora": ("base_model.model.table.lora_A.weight", "base_model.model.table.lora_B.weight"),
    "full": ("table.weight",),
}
"""What the arrays of a model are called there."""


async def _no_hook(what: object) -> None:
    return None


# --------------------------------------------------------------------------------------------------------------------
# The model


@dataclass(slots=True)
class Held:
    """What a snapshot keeps until it is dropped."""

    ref: SnapshotRef
    weights: Weights
    moments1: list[Array]
    moments2: list[Array]


@dataclass(slots=True)
class FakeWorld:
    vocab_size: int = 16
    max_context_length: int = 64
    name: str = FAKE_BASE
    seed: int = 0
    hook: Hook = _no_hook
    trains: frozenset[TrainableKind] = frozenset(("lora", "full"))
    """The kinds of models that are trained and sampled."""
    base_table: Array = field(init=False)
    adapters: dict[str, FakeAdapter] = field(init=False, default_factory=dict)
    snapshots: dict[Version, Held] = field(init=False, default_factory=dict)
    published: dict[Version, Weights] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.base_table = np.random.default_rng(self.seed).normal(size=(self.vocab_size, self.vocab_size))

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(
            name=self.name,
            aliases=("fake",),
            architecture="bigram",
            vocab_size=self.vocab_size,
            max_context_length=self.max_context_length,
            eos_token_ids=(0,),
            num_params=self.vocab_size**2,
            dtype="float64",
            device="cpu",
            adapter_numbers_per_rank=2 * self.vocab_size,
            trains=self.trains,
        )

    def logprobs(self, weights: Weights | None, tokens: NDArray[np.int32], temperature: float = 1.0) -> Array:
        """[L, V]: after each of ``tokens``."""
        return logprobs(self.base_table, weights, tokens, temperature)


# --------------------------------------------------------------------------------------------------------------------
# Trainer


class FakeTrainer:
    """``Trainer`` and ``Progress`` over a ``FakeWorld``. One task runs a model's commands, in order."""

    def __init__(self, world: FakeWorld):
        self.world = world
        self.facts = world.facts
        self._queues: dict[str, deque[tuple[Command, asyncio.Future[Result]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: list[Command] = []

    def running(self) -> str:
        return ", ".join(type(command).__name__ for command in self._running)

    def submit(self, command: Command) -> asyncio.Future[Result]:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        queue = self._queues.get(command.model_id)
        if queue is None:
            queue = self._queues[command.model_id] = deque()
            task = asyncio.create_task(self._run_model(command.model_id, queue))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        queue.append((command, future))
        return future

    async def _run_model(self, model_id: str, queue: deque[tuple[Command, asyncio.Future[Result]]]) -> None:
        while queue:
            command, future = queue.popleft()
            await asyncio.sleep(0)
            self._running.append(command)
            try:
                await self.world.hook(command)
                result = self.execute(command)
            except DescantError as error:
                self.remember_failure(command, error)
                if not future.done():
                    future.set_exception(error)
            except Exception as error:
                self.remember_failure(command, error)
                if not future.done():
                    future.set_exception(ServerError(f"{type(error).__name__}: {error}"))
            else:
                if not future.done():
                    future.set_result(result)
            finally:
                self._running.remove(command)
        del self._queues[model_id]

    def remember_failure(self, command: Command, error: Exception) -> None:
        adapter = self.world.adapters.get(command.model_id)
        if adapter is None:
            return
        if isinstance(command, ForwardBackward) and not command.forward_only:
            adapter.lost_gradient = f"the gradient of request {command.seq_id} is missing: {error}"
        if isinstance(command, Rejected) and command.poisons_gradient:
            adapter.lost_gradient = f"the gradient of request {command.seq_id} is missing: {command.message}"
        if isinstance(command, OptimStep):
            adapter.clear_gradient()

    def execute(self, command: Command) -> Result:
        """Now. Who calls it reports what it raises to ``remember_failure``."""
        match command:
            case CreateModel():
                return self._create(command)
            case Rejected():
                raise UserError(command.message)
            case DeleteModel():
                self.world.adapters.pop(command.model_id, None)
                return Deleted(model_id=command.model_id)
        adapter = self.world.adapters.get(command.model_id)
        if adapter is None:
            raise NotFound(f"there is no model {command.model_id!r}")
        match command:
            case ForwardBackward():
                result: Result = self._forward_backward(adapter, command)
            case OptimStep():
                result = self._optim_step(adapter, command)
            case Snapshot():
                result = self._snapshot(adapter, command)
            case LoadState():
                result = self._load(command.model_id, adapter.weights.trainable, command.source)
                adapter = self.world.adapters[command.model_id]
        adapter.applied_seq_id = command.seq_id
        return result

    def _create(self, command: CreateModel) -> ModelCreated:
        if command.model_id in self.world.adapters:
            raise UserError(f"model {command.model_id!r} exists already")
        if command.source is not None:
            self._load(command.model_id, None, command.source)
        else:
            trainable, seed = command.trainable, zlib.crc32(command.model_id.encode())
            self._check_kind(trainable, f"model {command.model_id!r}")
            if isinstance(trainable, Lora):
                if not 1 <= trainable.rank <= MAX_RANK:
                    raise UserError(f"lora_config.rank is {trainable.rank}, expected 1 to {MAX_RANK}")
                seed = trainable.seed if trainable.seed is not None else seed
            self.world.adapters[command.model_id] = FakeAdapter.fresh(trainable, self.world.base_table, seed)
        adapter = self.world.adapters[command.model_id]
        return ModelCreated(model_id=command.model_id, trainable=adapter.weights.trainable, step=adapter.step)

    def _forward_backward(self, adapter: FakeAdapter, command: ForwardBackward) -> ForwardBackwardOutput:
        check_forward_backward(command, self.facts)
        config = loss_fn_config(command)
        total, outputs = 0.0, []
        sums = [np.zeros_like(gradient) for gradient in adapter.gradient]
        for index, datum in enumerate(command.data):
            computed = compute(self.world.base_table, adapter.weights, datum, command.loss_fn, config)
            if not computed.finite_L.all():
                raise UserError(f"data[{index}]: its loss is not finite")
            total += float(computed.loss_L.sum())
            outputs.append({"logprobs": computed.logprobs.astype(np.float32)})
            for summed, part in zip(sums, computed.gradient):
                summed += part
        if not command.forward_only:
            for gradient, summed in zip(adapter.gradient, sums):
                gradient += summed
            adapter.pending_gradient = True
        return ForwardBackwardOutput(loss_fn_outputs=tuple(outputs), metrics={"loss:sum": total})

    def _optim_step(self, adapter: FakeAdapter, command: OptimStep) -> OptimStepOutput:
        if adapter.lost_gradient is not None:
            raise UserError(f"the step was not taken: {adapter.lost_gradient}")
        check_adam(command.adam_params)
        if not adapter.pending_gradient:
            return OptimStepOutput(metrics={"grad_norm:mean": 0.0, "step:max": float(adapter.step), "skipped:max": 1.0})
        norm = take_step(adapter, command.adam_params)
        adapter.clear_gradient()
        return OptimStepOutput(metrics={"grad_norm:mean": norm, "step:max": float(adapter.step)})

    def _snapshot(self, adapter: FakeAdapter, command: Snapshot) -> SnapshotRef:
        ref = SnapshotRef(
            version=Version(model_id=command.model_id, number=command.seq_id),
            kind=command.kind,
            trainable=adapter.weights.trainable,
            step=adapter.step,
            applied_seq_id=command.seq_id,
            has_pending_gradient=adapter.pending_gradient,
        )
        held = Held(
            ref,
            adapter.weights.copy(),
            [m.copy() for m in adapter.moments1] if command.for_disk else [],
            [m.copy() for m in adapter.moments2] if command.for_disk else [],
        )
        self.world.snapshots[ref.version] = held
        return ref

    def _check_kind(self, trainable: Trainable, of: str) -> None:
        if trainable.kind not in self.facts.trains:
            raise UserError(f"{of} is of kind {trainable.kind!r}, expected one of {sorted(self.facts.trains)}")

    def _load(self, model_id: str, expected: Trainable | None, source: CheckpointSource) -> Loaded:
        trainable = read_manifest(source.directory).trainable
        self._check_kind(trainable, source.uri)
        if expected is not None and not same_shape(expected, trainable):
            raise UserError(
                f"{source.uri} is of kind {trainable.kind!r} and has {trainable}, model {model_id!r} has {expected}"
            )
        manifest, weights = read_weights(source.directory)
        adapter = FakeAdapter.fresh(trainable, self.world.base_table, 0)
        if [array.shape for array in weights.arrays] != [array.shape for array in adapter.weights.arrays]:
            raise UserError(f"{source.uri} does not fit this base model")
        adapter.weights = weights
        if source.optimizer:
            if not manifest.has_optimizer:
                raise UserError(f"{source.uri} holds no optimiser state")
            moments = load(read_verified(source.directory, OPTIMIZER, manifest))
            adapter.moments1 = [moments[f"moment1.{name}"] for name in TENSORS[trainable.kind]]
            adapter.moments2 = [moments[f"moment2.{name}"] for name in TENSORS[trainable.kind]]
            adapter.step = manifest.step
        self.world.adapters[model_id] = adapter
        return Loaded(model_id=model_id, uri=source.uri, step=adapter.step)

    async def save(self, ref: SnapshotRef, dest: str) -> Manifest:
        await self.world.hook(ref)
        return self.write(ref, dest)

    def write(self, ref: SnapshotRef, dest: str) -> Manifest:
        held = self.world.snapshots.get(ref.version)
        if held is None or not held.moments1:
            raise NotFound(f"there is no snapshot of {ref.version} to save")
        trainable = held.ref.trainable
        names = TENSORS[trainable.kind]
        # float64 keeps the fake's continuation bit-equal; an adapter has PEFT's names.
        bodies = {WEIGHTS[trainable.kind]: save(dict(zip(names, held.weights.arrays)))}
        if isinstance(trainable, Lora):
            base = ExportBase(name=self.facts.name)
            bodies[ADAPTER_CONFIG] = adapter_config(trainable, base=base, modules=["table"])
        if held.ref.kind == "training":
            moments = ((1, held.moments1), (2, held.moments2))
            bodies[OPTIMIZER] = save({f"moment{n}.{name}": m for n, ms in moments for name, m in zip(names, ms)})
        try:
            files = {name: write_durable(Path(dest) / name, body) for name, body in bodies.items()}
        except OSError as error:
            raise cannot_store(error) from None
        return Manifest(
            base="",
            owner="",
            trainable=trainable,
            step=held.ref.step,
            applied_seq_id=held.ref.applied_seq_id,
            has_optimizer=held.ref.kind == "training",
            files=files,
        )

    async def drop(self, ref: SnapshotRef) -> None:
        self.world.snapshots.pop(ref.version, None)


def read_weights(directory: str) -> tuple[Manifest, Weights]:
    manifest = read_manifest(directory)
    trainable = manifest.trainable
    tensors = load(read_verified(directory, WEIGHTS[trainable.kind], manifest))
    return manifest, Weights(trainable, [tensors[name] for name in TENSORS[trainable.kind]])


# --------------------------------------------------------------------------------------------------------------------
# Engine


class FakeEngine:
    """``Engine`` over a ``FakeWorld``. A token is the character of its id (for stop strings). Of each version the last
    prompt of each scope is kept, token by token. An owner that has less than an even share of ``max_num_seqs`` finds
    room though all are taken. ``step_s``: how long a token of a request takes that follows its model."""

    def __init__(
        self,
        world: FakeWorld,
        *,
        max_num_seqs: int = 1024,
        capabilities: EngineCapabilities | None = None,
        step_s: float = 0.0,
    ):
        self.world = world
        self.capabilities = capabilities or EngineCapabilities(samples=world.trains)
        self.max_num_seqs = max_num_seqs
        self._step_s = step_s
        self._running: dict[str, asyncio.Event] = {}
        self._owners: Counter[str] = Counter()
        self._num_seeds = 0
        self._kept: dict[tuple[Version | None, str], Int32] = {}

    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        self._check(request)
        request = self._newest(request)
        weights = self._weights(request)
        if request.version is not None and weights is None:
            raise NotFound(f"{request.version} was never published, or was released")
        others = sum(count > 0 for owner, count in self._owners.items() if owner != request.owner)
        own = self._owners[request.owner]
        if len(self._running) >= self.max_num_seqs and own >= self.max_num_seqs // (1 + others):
            raise Overloaded(f"{len(self._running)} requests are running")
        cancelled = self._running[request.request_id] = asyncio.Event()
        self._owners[request.owner] += 1
        try:
            await self.world.hook(request)
            hit_tokens = self._keep(request)
            for index in range(request.num_samples):
                async for delta in self._sequence(request, weights, index):
                    if cancelled.is_set():
                        return
                    yield replace(delta, prompt_cache_hit_tokens=hit_tokens)
                    hit_tokens = 0
        finally:
            del self._running[request.request_id]
            self._owners[request.owner] -= 1

    def _keep(self, request: SampleRequest) -> int:
        """How many of the prompt's tokens were kept; the last is always computed."""
        prompt = input_tokens(request.prompt)
        kept = self._kept.get((request.version, request.prefix_scope), prompt[:0])
        self._kept[request.version, request.prefix_scope] = prompt
        length = min(len(kept), len(prompt) - 1)
        differs = np.flatnonzero(kept[:length] != prompt[:length])
        return int(differs[0]) if len(differs) else length

    async def _sequence(
        self, request: SampleRequest, weights: Weights | None, index: int
    ) -> AsyncIterator[SampleDelta]:
        tokens, logprobs, reason = self._draw(request, weights, index)
        prompt = self._prompt_scores(request, weights) if index == 0 else None
        emitted = at = 0

        def delta(end: int) -> SampleDelta:
            return SampleDelta(
                request_id=request.request_id,
                sample=index,
                tokens=np.asarray(tokens[emitted:end], np.int32),
                logprobs=np.asarray(logprobs[emitted:end], np.float32),
                stop_reason=reason if end == len(tokens) else None,
                version=request.version,
                prompt=prompt,
                topk_logprobs=self._topk_samples(request, weights, tokens, emitted, end),
            )

        while at < len(tokens):
            last = at == len(tokens) - 1
            if request.stream or request.inflight or last:
                await asyncio.sleep(self._step_s if request.inflight else 0)
            if at and (newest := self._newest(request)) != request:
                if emitted < at:
                    yield delta(at)
                    prompt, emitted = None, at
                request = newest
                given = EncodedText(tokens=np.asarray(tokens[:at], np.int32))
                params = replace(request.sampling_params, max_tokens=len(tokens) - at)
                rest = replace(request, prompt=(*request.prompt, given), sampling_params=params)
                weights = self._weights(request)
                more, more_logprobs, reason = self._draw(rest, weights, index)
                tokens, logprobs = tokens[:at] + more, logprobs[:at] + more_logprobs
                last = at == len(tokens) - 1
            at += 1
            if request.stream or last:
                yield delta(at)
                prompt, emitted = None, at

    def _weights(self, request: SampleRequest) -> Weights | None:
        return None if request.version is None else self.world.published.get(request.version)

    def _newest(self, request: SampleRequest) -> SampleRequest:
        """The request with the version that it is to go on with."""
        if not request.inflight or request.version is None:
            return request
        newer = [v for v in self.world.published if v.model_id == request.version.model_id and v > request.version]
        return replace(request, version=max(newer)) if newer else request

    def _draw(
        self, request: SampleRequest, weights: Weights | None, index: int
    ) -> tuple[list[int], list[float], StopReason]:
        params, facts = request.sampling_params, self.world.facts
        if params.seed is None:
            self._num_seeds += 1
        random = np.random.default_rng([params.seed if params.seed is not None else 10**6 + self._num_seeds, index])
        last = int(input_tokens(request.prompt)[-1])
        limit = params.max_tokens or max(1, facts.max_context_length - input_length(request.prompt))
        stop = facts.eos_token_ids if params.stop is None else params.stop
        tokens: list[int] = []
        logprobs: list[float] = []
        for _ in range(limit):
            row = self.world.logprobs(weights, np.asarray([last], np.int32), params.temperature or 1.0)[0]
            if params.temperature == 0:
                last = int(row.argmax())
            else:
                order = np.argsort(-row, kind="stable")
                if params.top_k > 0:
                    order = order[: params.top_k]
                p = np.exp(row[order])
                keep = np.cumsum(p) - p < params.top_p * (1 if params.top_k <= 0 else p.sum())
                p = np.where(keep, p, 0)
                last = int(random.choice(order, p=p / p.sum()))
            tokens.append(last)
            logprobs.append(float(row[last]))
            text = "".join(map(chr, tokens))
            if any(text.endswith(s) if isinstance(s, str) else last == s for s in stop):
                return tokens, logprobs, "stop"
        return tokens, logprobs, "length"

    def _topk_samples(
        self, request: SampleRequest, weights: Weights | None, tokens: Sequence[int], start: int, end: int
    ) -> TopK | None:
        if not (k := request.topk_sample_logprobs):
            return None
        before = np.asarray([input_tokens(request.prompt)[-1], *tokens], np.int32)[start:end]
        return _likeliest(self.world.logprobs(weights, before, request.sampling_params.temperature or 1.0), k)

    def _prompt_scores(self, request: SampleRequest, weights: Weights | None) -> PromptScores | None:
        tokens = input_tokens(request.prompt)
        rows = self.world.logprobs(weights, tokens[:-1])
        first = len(tokens) - (request.prompt_logprobs_last_n or len(tokens) - 1)
        logprobs = topk = targets = alternatives = None
        if request.prompt_logprobs:
            logprobs = np.full(len(tokens), np.nan, np.float32)
            logprobs[first:] = rows[np.arange(len(tokens) - 1), tokens[1:]][first - 1 :]
        if k := request.topk_prompt_logprobs:
            topk = empty_topk(len(tokens), k)
            best = _likeliest(rows[first - 1 :], k)
            fill_topk(topk, first, best.token_ids, best.logprobs)
        if (wanted := request.target_prompt_logprobs) is not None:
            owners = np.repeat(np.arange(len(rows)), np.diff(wanted.row_starts()))
            asked = np.where(wanted.data >= 0, rows[owners, wanted.data.astype(np.int64)], 0.0)
            targets = replace(wanted, data=asked.astype(np.float32))
        if k := request.prompt_alt_tokens_k:
            scaled = self.world.logprobs(weights, tokens[:-1], request.sampling_params.temperature or 1.0)
            random = np.random.default_rng([request.sampling_params.seed or 0, 10**6])
            uniform = random.random((len(rows), k, 1))
            sampled = np.argmax(np.cumsum(np.exp(scaled), axis=-1)[:, None] > uniform * 0.999999, axis=-1)
            if request.sampling_params.temperature == 0:
                sampled = np.repeat(rows.argmax(axis=-1)[:, None], k, axis=1)
            alternatives = PromptAltTokens(
                tokens=sampled.astype(np.int64), logprobs=np.take_along_axis(rows, sampled, -1).astype(np.float32)
            )
        if logprobs is topk is targets is alternatives is None:
            return None
        return PromptScores(logprobs=logprobs, topk=topk, target_logprobs=targets, alt_tokens=alternatives)

    def _check(self, request: SampleRequest) -> None:
        params, facts, tokens = request.sampling_params, self.world.facts, input_tokens(request.prompt)
        limit = facts.max_context_length
        if not len(tokens):
            raise UserError("prompt is empty, expected at least one token")
        if not (tokens.min() >= 0 and tokens.max() < facts.vocab_size):
            raise UserError(f"prompt has a token id outside 0..{facts.vocab_size - 1}")
        if not 1 <= request.num_samples <= self.capabilities.max_num_samples:
            raise UserError(f"num_samples is {request.num_samples}, expected 1 to {self.capabilities.max_num_samples}")
        if params.max_tokens is not None and params.max_tokens < 1:
            raise UserError(f"sampling_params.max_tokens is {params.max_tokens}, expected at least 1")
        if len(tokens) > limit or (params.max_tokens or 1) > max(1, limit - len(tokens)):
            raise UserError(
                f"prompt has {len(tokens)} tokens and sampling_params.max_tokens is {params.max_tokens}: together more "
                f"than the context of {limit}"
            )
        if not (np.isfinite(params.temperature) and params.temperature >= 0):
            raise UserError(f"sampling_params.temperature is {params.temperature}, expected 0 or more")
        if not 0 < params.top_p <= 1:
            raise UserError(f"sampling_params.top_p is {params.top_p}, expected above 0 and at most 1")
        if params.top_k != -1 and params.top_k < 1:
            raise UserError(f"sampling_params.top_k is {params.top_k}, expected -1 or at least 1")
        check_scores(request, vocab_size=facts.vocab_size, max_topk=self.capabilities.max_topk_prompt_logprobs)

    async def publish(self, ref: SnapshotRef) -> None:
        await self.world.hook(ref)
        if ref.version in self.world.published:
            return
        if ref.trainable.kind not in self.capabilities.samples:
            samples = sorted(self.capabilities.samples)
            raise UserError(f"{ref.version} is of kind {ref.trainable.kind!r}, expected one of {samples}")
        held = self.world.snapshots.get(ref.version)
        if held is not None:
            self.world.published[ref.version] = held.weights.copy()
        elif ref.directory is not None:
            self.world.published[ref.version] = read_weights(ref.directory)[1]
        else:
            raise NotFound(f"there is no snapshot of {ref.version} to publish")

    async def release(self, version: Version) -> None:
        self.world.published.pop(version, None)
        for key in [key for key in self._kept if key[0] == version]:
            del self._kept[key]

    async def cancel(self, request_id: str) -> None:
        if (running := self._running.get(request_id)) is not None:
            running.set()


def _likeliest(rows: np.ndarray, k: int) -> TopK:
    best = np.argsort(-rows, axis=-1, kind="stable")[:, :k]
    topk = empty_topk(len(rows), k)
    fill_topk(topk, 0, best.astype(np.int32), np.take_along_axis(rows, best, -1).astype(np.float32))
    return topk


# --------------------------------------------------------------------------------------------------------------------
# CheckpointStore


class FakeCheckpointStore:
    """``CheckpointStore`` over a directory, its index in memory: nothing survives it."""

    def __init__(self, directory: str | Path | None = None):
        self.directory = Path(directory or tempfile.mkdtemp(prefix="descant-fake-store-"))
        self._checkpoints: dict[CheckpointName, Checkpoint] = {}
        self._num_attempts = 0

    async def attempt(self, name: CheckpointName) -> str:
        self._num_attempts += 1
        path = self.directory / f"attempt-{self._num_attempts}"
        path.mkdir(parents=True)
        return str(path)

    async def commit(self, name: CheckpointName, attempt: str, manifest: Manifest) -> Checkpoint:
        try:
            for path, entry in manifest.files.items():
                check_file(attempt, path, entry)
        except Damaged as error:
            raise ServerError(f"{name.uri} was not written whole: {error}") from None
        (Path(attempt) / MANIFEST).write_bytes(encode_manifest(manifest))
        checkpoint = Checkpoint(name=name, directory=attempt, manifest=manifest)
        replaced = self._checkpoints.pop(name, None)
        self._checkpoints[name] = checkpoint
        if replaced is not None:
            shutil.rmtree(replaced.directory, ignore_errors=True)
        return checkpoint

    async def abandon(self, attempt: str) -> None:
        if all(checkpoint.directory != attempt for checkpoint in self._checkpoints.values()):
            shutil.rmtree(attempt, ignore_errors=True)

    async def open(self, name: CheckpointName) -> Checkpoint:
        if name not in self._checkpoints:
            raise NotFound(f"there is no checkpoint {name.uri}")
        checkpoint = self._checkpoints[name]
        try:
            manifest = read_manifest(checkpoint.directory)
            for path, entry in manifest.files.items():
                check_file(checkpoint.directory, path, entry)
        except (Damaged, NotFound) as error:
            raise damaged(name.uri, Damaged(str(error))) from None
        return checkpoint

    async def list(self, model_id: str | None = None) -> Sequence[Checkpoint]:
        found = [c for c in self._checkpoints.values() if model_id is None or c.name.model_id == model_id]
        return found[::-1]

    async def delete(self, name: CheckpointName) -> None:
        if name not in self._checkpoints:
            raise NotFound(f"there is no checkpoint {name.uri}")
        checkpoint = self._checkpoints.pop(name)
        shutil.rmtree(checkpoint.directory, ignore_errors=True)
