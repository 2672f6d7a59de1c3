"""Small real implementations of Trainer, Engine and CheckpointStore: numpy, one event loop, no threads.

``FakeWorld`` is a base model of one table (the logits of the next token given the last one) and any number of rank-r
adapters on it, ``logits[prev] = base[prev] + (32 / r) · (B A)[prev]``. Losses, gradients, AdamW and sampling are real,
so what is trained can be sampled, saved, loaded and compared.

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
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from descant.ckpt.manifest import (
    MANIFEST,
    encode_manifest,
    read_manifest,
    read_verified,
    write_durable,
)
from descant.ckpt.peft import ADAPTER, ADAPTER_CONFIG, OPTIMIZER, adapter_config
from descant.errors import DescantError, NotFound, Overloaded, ServerError, UserError
from descant.sample.check import check_scores
from descant.sample.scores import empty_topk, fill_topk
from descant.train.check import check_adam, check_forward_backward, dense_inputs, loss_fn_config
from descant.types import (
    MAX_RANK,
    SCALE_NUMERATOR,
    Checkpoint,
    CheckpointName,
    CheckpointSource,
    Command,
    CreateModel,
    Deleted,
    DeleteModel,
    EncodedText,
    EngineCapabilities,
    FileEntry,
    ForwardBackward,
    ForwardBackwardOutput,
    Int32,
    Loaded,
    LoadState,
    LoraConfig,
    Manifest,
    ModelCreated,
    ModelFacts,
    OptimStep,
    OptimStepOutput,
    PromptAltTokens,
    PromptScores,
    Refused,
    Result,
    SampleDelta,
    SampleRequest,
    Snapshot,
    SnapshotRef,
    StopReason,
    TopK,
    Version,
    input_length,
    input_tokens,
)

Array = NDArray[np.float64]
Hook = Callable[[object], Awaitable[None]]

FAKE_BASE = "fake/bigram"
PREFIX = "base_model.model.table"


async def _no_hook(what: object) -> None:
    return None


# --------------------------------------------------------------------------------------------------------------------
# The model


@dataclass(slots=True)
class Weights:
    """``a`` [r, V], ``b`` [V, r]."""

    lora: LoraConfig
    a: Array
    b: Array

    def copy(self) -> Weights:
        return Weights(self.lora, self.a.copy(), self.b.copy())

    def table(self) -> Array:
        """What the adapter adds to the logits, [V, V]."""
        return SCALE_NUMERATOR / self.lora.rank * (self.b @ self.a)


@dataclass(slots=True)
class Adapter:
    """One model: its weights, gradient, AdamW moments, and what went wrong since the last step."""

    weights: Weights
    gradient: list[Array]
    moments1: list[Array]
    moments2: list[Array]
    step: int = 0
    applied_seq_id: int = 0
    pending_gradient: bool = False
    lost_gradient: str | None = None

    @staticmethod
    def fresh(lora: LoraConfig, vocab_size: int, seed: int) -> Adapter:
        a = np.random.default_rng(seed).uniform(-1, 1, (lora.rank, vocab_size)) / np.sqrt(vocab_size)
        b = np.zeros((vocab_size, lora.rank))
        gradient, moments1, moments2 = ([np.zeros_like(a), np.zeros_like(b)] for _ in range(3))
        return Adapter(Weights(lora, a, b), gradient, moments1, moments2)

    def clear_gradient(self) -> None:
        for gradient in self.gradient:
            gradient[:] = 0
        self.pending_gradient, self.lost_gradient = False, None


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
    base_table: Array = field(init=False)
    adapters: dict[str, Adapter] = field(init=False, default_factory=dict)
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
        )

    def logprobs(self, weights: Weights | None, tokens: NDArray[np.int32], temperature: float = 1.0) -> Array:
        """[L, V]: after each of ``tokens``."""
        logits = self.base_table[tokens]
        if weights is not None:
            logits = logits + weights.table()[tokens]
        logits = logits / temperature
        logits = logits - logits.max(-1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def _loss(loss_fn: str, config: Mapping[str, float], inputs: Mapping[str, np.ndarray], p: Array) -> tuple[Array, Array]:
    """Per-token loss and its derivative by p, both shaped like the targets."""
    if loss_fn == "cross_entropy":
        return -p * inputs["weights"], -inputs["weights"].astype(np.float64)
    q, advantages = inputs["logprobs"].astype(np.float64), inputs["advantages"].astype(np.float64)
    ratio = np.exp(p - q)
    if loss_fn == "gspo":
        mask = inputs["sequence_ratio_mask"] == 1
        ratio, advantages = np.exp(np.mean(p - q, where=mask) if mask.any() else 0.0), advantages * mask
    if loss_fn == "importance_sampling":
        return -ratio * advantages, -ratio * advantages
    if loss_fn == "dro":
        return -(p * advantages - config["beta"] / 2 * (p - q) ** 2), -(advantages - config["beta"] * (p - q))
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    if loss_fn == "cispo":
        return -clipped * p * advantages, -clipped * advantages
    chosen = np.minimum(ratio * advantages, clipped * advantages)
    return -chosen, np.where(ratio * advantages <= clipped * advantages, -ratio * advantages, 0.0)


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
                result = self._execute(command)
            except DescantError as error:
                self._remember_failure(command, error)
                if not future.done():
                    future.set_exception(error)
            except Exception as error:
                self._remember_failure(command, error)
                if not future.done():
                    future.set_exception(ServerError(f"{type(error).__name__}: {error}"))
            else:
                if not future.done():
                    future.set_result(result)
            finally:
                self._running.remove(command)
        del self._queues[model_id]

    def _remember_failure(self, command: Command, error: Exception) -> None:
        adapter = self.world.adapters.get(command.model_id)
        if adapter is None:
            return
        if isinstance(command, ForwardBackward) and not command.forward_only:
            adapter.lost_gradient = f"the gradient of request {command.seq_id} is missing: {error}"
        if isinstance(command, Refused) and command.loses_gradient:
            adapter.lost_gradient = f"the gradient of request {command.seq_id} is missing: {command.message}"
        if isinstance(command, OptimStep):
            adapter.clear_gradient()

    def _execute(self, command: Command) -> Result:
        match command:
            case CreateModel():
                return self._create(command)
            case Refused():
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
                result = self._load(command.model_id, adapter.weights.lora, command.source)
                adapter = self.world.adapters[command.model_id]
        adapter.applied_seq_id = command.seq_id
        return result

    def _create(self, command: CreateModel) -> ModelCreated:
        if command.model_id in self.world.adapters:
            raise UserError(f"model {command.model_id!r} exists already")
        if command.source is not None:
            self._load(command.model_id, None, command.source)
        else:
            lora = command.lora
            if not 1 <= lora.rank <= MAX_RANK:
                raise UserError(f"lora_config.rank is {lora.rank}, expected 1 to {MAX_RANK}")
            seed = lora.seed if lora.seed is not None else zlib.crc32(command.model_id.encode())
            self.world.adapters[command.model_id] = Adapter.fresh(lora, self.world.vocab_size, seed)
        adapter = self.world.adapters[command.model_id]
        return ModelCreated(model_id=command.model_id, lora=adapter.weights.lora, step=adapter.step)

    def _forward_backward(self, adapter: Adapter, command: ForwardBackward) -> ForwardBackwardOutput:
        check_forward_backward(command, self.facts)
        config = loss_fn_config(command)
        weights, scale = adapter.weights, SCALE_NUMERATOR / adapter.weights.lora.rank
        total, outputs = 0.0, []
        sums = [np.zeros_like(gradient) for gradient in adapter.gradient]
        for index, datum in enumerate(command.data):
            tokens, inputs = input_tokens(datum.model_input), dense_inputs(datum, command.loss_fn)
            targets = inputs["target_tokens"]
            logprobs = self.world.logprobs(weights, tokens)
            targets_LK = targets.reshape(len(tokens), -1)
            p = np.take_along_axis(logprobs, targets_LK, -1).reshape(targets.shape)
            with np.errstate(over="ignore", invalid="ignore"):
                loss, dloss = _loss(command.loss_fn, config, inputs, p)
            if not (np.isfinite(loss).all() and np.isfinite(dloss).all()):
                raise UserError(f"data[{index}]: its loss is not finite")
            total += float(loss.sum())
            outputs.append({"logprobs": p.astype(np.float32)})
            dloss_LK = dloss.reshape(len(tokens), -1)
            dlogits = -np.exp(logprobs) * dloss_LK.sum(-1, keepdims=True)
            for k in range(targets_LK.shape[1]):
                dlogits[np.arange(len(tokens)), targets_LK[:, k]] += dloss_LK[:, k]
            dtable = np.zeros_like(self.world.base_table)
            np.add.at(dtable, tokens, scale * dlogits)
            sums[0] += weights.b.T @ dtable
            sums[1] += dtable @ weights.a.T
        if not command.forward_only:
            for gradient, summed in zip(adapter.gradient, sums):
                gradient += summed
            adapter.pending_gradient = True
        return ForwardBackwardOutput(loss_fn_outputs=tuple(outputs), metrics={"loss:sum": total})

    def _optim_step(self, adapter: Adapter, command: OptimStep) -> OptimStepOutput:
        params = command.adam_params
        if adapter.lost_gradient is not None:
            raise UserError(f"the step was not taken: {adapter.lost_gradient}")
        check_adam(params)
        norm = float(np.sqrt(sum((gradient**2).sum() for gradient in adapter.gradient)))
        clip = min(1.0, params.grad_clip_norm / norm) if params.grad_clip_norm > 0 and norm > 0 else 1.0
        step = adapter.step + 1
        updates: list[tuple[Array, Array, Array]] = []
        with np.errstate(over="ignore", invalid="ignore"):
            for i, old in enumerate((adapter.weights.a, adapter.weights.b)):
                gradient = adapter.gradient[i] * clip
                m = params.beta1 * adapter.moments1[i] + (1 - params.beta1) * gradient
                v = params.beta2 * adapter.moments2[i] + (1 - params.beta2) * gradient**2
                direction = m / (1 - params.beta1**step) / (np.sqrt(v / (1 - params.beta2**step)) + params.eps)
                new = old * (1 - params.learning_rate * params.weight_decay) - params.learning_rate * direction
                new = np.where((direction == 0) | np.isfinite(direction), new, np.nan)
                updates.append((new.astype(np.float32).astype(np.float64), m, v))
        if not all(np.isfinite(new).all() for new, _, _ in updates):
            raise UserError("the step was not taken: it would make a weight not finite")
        adapter.weights.a, adapter.weights.b = updates[0][0], updates[1][0]
        adapter.moments1, adapter.moments2 = [u[1] for u in updates], [u[2] for u in updates]
        adapter.step = step
        adapter.clear_gradient()
        return OptimStepOutput(metrics={"grad_norm:mean": norm, "step:max": float(step)})

    def _snapshot(self, adapter: Adapter, command: Snapshot) -> SnapshotRef:
        ref = SnapshotRef(
            version=Version(model_id=command.model_id, number=command.seq_id),
            kind=command.kind,
            lora=adapter.weights.lora,
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

    def _load(self, model_id: str, expected: LoraConfig | None, source: CheckpointSource) -> Loaded:
        manifest, weights = read_adapter(source.directory)
        if expected is not None and replace(expected, seed=None) != replace(manifest.lora, seed=None):
            raise UserError(f"{source.uri} has {manifest.lora}, model {model_id!r} has {expected}")
        adapter = Adapter.fresh(manifest.lora, self.world.vocab_size, 0)
        if weights.a.shape != adapter.weights.a.shape or weights.b.shape != adapter.weights.b.shape:
            raise UserError(f"{source.uri} does not fit this base model")
        adapter.weights = weights
        if source.optimizer:
            if not manifest.has_optimizer:
                raise UserError(f"{source.uri} holds no optimiser state")
            moments = load(read_verified(source.directory, OPTIMIZER, manifest))
            adapter.moments1 = [moments["moment1.a"], moments["moment1.b"]]
            adapter.moments2 = [moments["moment2.a"], moments["moment2.b"]]
            adapter.step = manifest.step
        self.world.adapters[model_id] = adapter
        return Loaded(model_id=model_id, uri=source.uri, step=adapter.step)

    async def save(self, ref: SnapshotRef, dest: str) -> Manifest:
        await self.world.hook(ref)
        held = self.world.snapshots.get(ref.version)
        if held is None or not held.moments1:
            raise NotFound(f"there is no snapshot of {ref.version} to save")
        lora = held.ref.lora
        # float64 keeps the fake's continuation bit-equal; PEFT's names are kept.
        bodies = {
            ADAPTER: save({f"{PREFIX}.lora_A.weight": held.weights.a, f"{PREFIX}.lora_B.weight": held.weights.b}),
            ADAPTER_CONFIG: adapter_config(lora, base=self.facts.name, target_modules=["table"]),
        }
        if held.ref.kind == "training":
            bodies[OPTIMIZER] = save(
                {f"moment{n}.{k}": m for n, ms in ((1, held.moments1), (2, held.moments2)) for k, m in zip("ab", ms)}
            )
        try:
            files = {name: write_durable(Path(dest) / name, body) for name, body in bodies.items()}
        except OSError as error:
            raise ServerError(f"cannot write a checkpoint into {dest}: {error.strerror}") from None
        return Manifest(
            base="",
            owner="",
            lora=lora,
            step=held.ref.step,
            applied_seq_id=held.ref.applied_seq_id,
            has_optimizer=held.ref.kind == "training",
            files=files,
        )

    async def drop(self, ref: SnapshotRef) -> None:
        self.world.snapshots.pop(ref.version, None)


def read_adapter(directory: str) -> tuple[Manifest, Weights]:
    manifest = read_manifest(directory)
    tensors = load(read_verified(directory, ADAPTER, manifest))
    return manifest, Weights(manifest.lora, tensors[f"{PREFIX}.lora_A.weight"], tensors[f"{PREFIX}.lora_B.weight"])


# --------------------------------------------------------------------------------------------------------------------
# Engine


class FakeEngine:
    """``Engine`` over a ``FakeWorld``. A token is the character of its id (for stop strings). Of each version the last
    prompt is kept, token by token."""

    def __init__(self, world: FakeWorld, *, max_running: int = 1024, capabilities: EngineCapabilities | None = None):
        self.world = world
        self.capabilities = capabilities or EngineCapabilities()
        self.max_running = max_running
        self._running: dict[str, asyncio.Event] = {}
        self._num_seeds = 0
        self._kept: dict[Version | None, Int32] = {}

    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleDelta]:
        self._check(request)
        request = self._newest(request)
        weights = self._weights(request)
        if request.version is not None and weights is None:
            raise NotFound(f"{request.version} was never published, or was released")
        if len(self._running) >= self.max_running:
            raise Overloaded(f"{self.max_running} requests are running")
        cancelled = self._running[request.request_id] = asyncio.Event()
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

    def _keep(self, request: SampleRequest) -> int:
        """How many of the prompt's tokens were kept; the last is always computed."""
        prompt = input_tokens(request.prompt)
        kept = self._kept.get(request.version, prompt[:0])
        self._kept[request.version] = prompt
        length = min(len(kept), len(prompt) - 1)
        differs = np.flatnonzero(kept[:length] != prompt[:length])
        return int(differs[0]) if len(differs) else length

    async def _sequence(
        self, request: SampleRequest, weights: Weights | None, index: int
    ) -> AsyncIterator[SampleDelta]:
        tokens, logprobs, reason = self._draw(request, weights, index)
        prompt = self._prompt_scores(request, weights) if index == 0 else None
        told = at = 0

        def delta(end: int) -> SampleDelta:
            return SampleDelta(
                request_id=request.request_id,
                sample=index,
                tokens=np.asarray(tokens[told:end], np.int32),
                logprobs=np.asarray(logprobs[told:end], np.float32),
                stop_reason=reason if end == len(tokens) else None,
                version=request.version,
                prompt=prompt,
                topk_logprobs=self._topk_samples(request, weights, tokens, told, end),
            )

        while at < len(tokens):
            last = at == len(tokens) - 1
            if request.stream or request.inflight or last:
                await asyncio.sleep(0)
            if at and (newest := self._newest(request)) != request:
                if told < at:
                    yield delta(at)
                    prompt, told = None, at
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
                prompt, told = None, at

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
        limit = params.max_tokens or facts.max_context_length - input_length(request.prompt)
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
            drawn = np.argmax(np.cumsum(np.exp(scaled), axis=-1)[:, None] > uniform * 0.999999, axis=-1)
            if request.sampling_params.temperature == 0:
                drawn = np.repeat(rows.argmax(axis=-1)[:, None], k, axis=1)
            alternatives = PromptAltTokens(
                tokens=drawn.astype(np.int64), logprobs=np.take_along_axis(rows, drawn, -1).astype(np.float32)
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
        if len(tokens) + (params.max_tokens or 1) > limit:
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
        held = self.world.snapshots.get(ref.version)
        if held is not None:
            self.world.published[ref.version] = held.weights.copy()
        elif ref.directory is not None:
            self.world.published[ref.version] = read_adapter(ref.directory)[1]
        else:
            raise NotFound(f"there is no snapshot of {ref.version} to publish")

    async def release(self, version: Version) -> None:
        self.world.published.pop(version, None)
        self._kept.pop(version, None)

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
    """``CheckpointStore`` over a directory, its catalogue in memory: nothing survives it."""

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
        for path, entry in manifest.files.items():
            _check_file(Path(attempt), path, entry)
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
        return self._checkpoints[name]

    async def list(self, model_id: str | None = None) -> Sequence[Checkpoint]:
        found = [c for c in self._checkpoints.values() if model_id is None or c.name.model_id == model_id]
        return found[::-1]

    async def delete(self, name: CheckpointName) -> None:
        checkpoint = await self.open(name)
        del self._checkpoints[name]
        shutil.rmtree(checkpoint.directory, ignore_errors=True)


def _check_file(attempt: Path, path: str, entry: FileEntry) -> None:
    try:
        size = (attempt / path).stat().st_size
    except OSError:
        raise ServerError(f"{path} of the manifest is missing in {attempt}") from None
    if size != entry.size_bytes:
        raise ServerError(f"{path} in {attempt} has {size} bytes, its manifest says {entry.size_bytes}")
