"""The nouns of Descant. Frozen, named as the Tinker SDK names them, numpy at most.

Everything here is plain data: it pickles, it holds no tensor, no handle and no lock. ``Command`` is what a trainer does
in order, ``SampleRequest`` is what an engine does out of order, ``*Output`` is what comes back.

Array legend: L tokens of a datum's model input, N a prompt's tokens, S sampled tokens, K alternatives per position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

SCALE_NUMERATOR = 32.0
"""An adapter of true rank r adds ``(32 / r) · B A x``, as the hosted service does (PEFT: ``lora_alpha=32``)."""

MAX_RANK = 256

# --------------------------------------------------------------------------------------------------------------------
# Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """A run of token ids. ``tokens`` int32 [n]."""

    tokens: Int32

    @property
    def length(self) -> int:
        return len(self.tokens)


Chunk = EncodedText
"""Images and audio will join this union; until then ``wire`` rejects them."""

ModelInput = tuple[Chunk, ...]


def input_length(model_input: ModelInput) -> int:
    return sum(chunk.length for chunk in model_input)


def input_tokens(model_input: ModelInput) -> Int32:
    """All tokens of a text-only input, int32 [L]."""
    if len(model_input) == 1:
        return model_input[0].tokens
    return np.concatenate([chunk.tokens for chunk in model_input]) if model_input else np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training sequence.

    ``loss_fn_inputs``: dense arrays by the SDK's names: ``target_tokens`` int64 [L] or [L, K]; ``weights``,
    ``logprobs``, ``advantages``, ``sequence_ratio_mask`` float32 of that shape ([L] for the RL losses).
    ``train.check`` checks them.
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, np.ndarray]


LOSS_FN_INPUTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": ("target_tokens", "logprobs", "advantages"),
    "ppo": ("target_tokens", "logprobs", "advantages"),
    "cispo": ("target_tokens", "logprobs", "advantages"),
    "dro": ("target_tokens", "logprobs", "advantages"),
    "gspo": ("target_tokens", "logprobs", "advantages", "sequence_ratio_mask"),
}
"""The losses served, and the arrays each takes. ``weights`` may be left out (ones)."""


# --------------------------------------------------------------------------------------------------------------------
# What of a model is trained, and how


TrainableKind = Literal["lora", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """An adapter beside the base's own weights, which stay as they are: A and B of ``rank`` at each chosen layer."""

    kind: ClassVar[TrainableKind] = "lora"

    rank: int = 32
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """All of the base's own weights, from what they are: nothing to choose, so no field. No rank trains it yet
    (``ModelFacts.trains``), and no request of the wire asks for it."""

    kind: ClassVar[TrainableKind] = "full"


Trainable: TypeAlias = Lora | Full


def same_shape(one: Trainable, other: Trainable) -> bool:
    """Whether weights of one can be loaded into the other: they differ at most in the seed."""
    if isinstance(one, Lora) and isinstance(other, Lora):
        return replace(one, seed=None) == replace(other, seed=None)
    return one == other


def describe(trainable: Trainable) -> str:
    """The shape, as a message has it: ``rank 8 with train_attn, train_mlp``."""
    if not isinstance(trainable, Lora):
        return "all of the base's weights"
    chosen = [name for name in ("train_attn", "train_mlp", "train_unembed") if getattr(trainable, name)]
    return f"rank {trainable.rank} with {', '.join(chosen)}"


def trainable_to_json(trainable: Trainable) -> dict[str, Any]:
    """The form in which it is stored, in manifests and in the database: its fields, and its kind as ``kind``."""
    return {"kind": trainable.kind, **asdict(trainable)}


def trainable_from_json(fields: Mapping[str, Any]) -> Trainable:
    """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for what is no such form."""
    others = {name: value for name, value in fields.items() if name != "kind"}
    match fields["kind"]:
        case Lora.kind:
            return Lora(**others)
        case Full.kind:
            return Full(**others)
    raise ValueError(f"kind is {fields['kind']!r}, expected {Lora.kind!r} or {Full.kind!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """``grad_clip_norm`` 0 means no clipping; weight decay is decoupled (AdamW)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


# --------------------------------------------------------------------------------------------------------------------
# Facts about a served base model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the layers above the ranks may know of a base model.

    ``name`` is what clients call it and what the SDK can load a tokenizer from. ``aliases`` are accepted as well, and
    ``short_names``, from which no tokenizer loads, where the answer names the base.
    """

    name: str
    aliases: tuple[str, ...] = ()
    short_names: tuple[str, ...] = ()
    architecture: str
    vocab_size: int
    max_context_length: int
    eos_token_ids: tuple[int, ...]
    num_params: int
    dtype: str
    device: str
    packable: bool = True
    adapter_numbers_per_rank: int = 0
    """How many numbers an adapter has for each rank, whatever of it is trained."""
    trains: frozenset[TrainableKind] = frozenset(("lora",))
    """The kinds of models that its trainer takes."""


# --------------------------------------------------------------------------------------------------------------------
# Commands: what a trainer does, in seq_id order per model


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """A committed checkpoint to start from. ``directory`` is readable by the rank; ``uri`` is its tinker:// name."""

    uri: str
    directory: str
    optimizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModel:
    model_id: str
    seq_id: int = 0
    trainable: Trainable
    source: CheckpointSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """Adds the gradient of the summed loss to the model's, or with ``forward_only`` only evaluates it."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    model_id: str
    seq_id: int
    adam_params: AdamParams


SnapshotKind = Literal["training", "sampler"]

Role = Literal["train", "sample"]
"""What a replica does for its base."""

ROLES: frozenset[Role] = frozenset(("train", "sample"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Freeze the model as it is now. ``training`` holds weights and optimiser state, ``sampler`` the weights alone.

    ``for_disk`` False (an ephemeral sampler save, for an engine that shares rows) keeps only the working copy that the
    engine computes with. ``to_publish``: ``Engine.publish`` on the same replica is what comes next, and is done along
    with it, so that who follows the model's newest weights has them at once.
    """

    model_id: str
    seq_id: int
    kind: SnapshotKind
    for_disk: bool = True
    to_publish: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    model_id: str
    seq_id: int
    source: CheckpointSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteModel:
    model_id: str
    seq_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A request that was rejected after its seq_id was known, or a gap that was closed. Takes its place in order.

    ``poisons_gradient``: the request was, or may have been, a backward; the next optimiser step must fail too.
    """

    model_id: str
    seq_id: int
    message: str
    poisons_gradient: bool


Command = CreateModel | ForwardBackward | OptimStep | Snapshot | LoadState | DeleteModel | Rejected


# --------------------------------------------------------------------------------------------------------------------
# Results of commands


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCreated:
    """``trainable`` and ``step`` as they are now: after a load from a checkpoint, the checkpoint's."""

    model_id: str
    trainable: Trainable
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """``loss_fn_outputs[i]`` belongs to datum i: ``logprobs`` float32 with the shape of its ``target_tokens``.

    ``metrics``: every key is ``name:reduction`` with exactly one colon; ``loss:sum`` is always there.
    """

    loss_fn_outputs: tuple[Mapping[str, np.ndarray], ...]
    metrics: Mapping[str, float]
    loss_fn_output_type: str = "TensorData"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepOutput:
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Version:
    """One frozen state of one model's weights. ``number`` is the seq_id of the save that made it (replay-stable)."""

    model_id: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRef:
    """Names a snapshot; holds no tensor. ``directory`` is set when its weights lie in a committed checkpoint."""

    version: Version
    kind: SnapshotKind
    trainable: Trainable
    step: int
    applied_seq_id: int
    has_pending_gradient: bool
    directory: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    model_id: str
    uri: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    model_id: str


Result = ModelCreated | ForwardBackwardOutput | OptimStepOutput | SnapshotRef | Loaded | Deleted


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints


CheckpointType = Literal["weights", "sampler_weights"]
"""The middle segment of a tinker:// path; part of a checkpoint's identity."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CheckpointName:
    """``tinker://{model_id}/{type}/{name}``: exactly three segments, so no part may contain a slash."""

    model_id: str
    type: CheckpointType
    name: str

    @property
    def uri(self) -> str:
        return f"tinker://{self.model_id}/{self.type}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds; it exists when this exists. ``files`` by path relative to the checkpoint's directory."""

    base: str
    owner: str
    trainable: Trainable
    step: int
    applied_seq_id: int
    has_optimizer: bool
    files: Mapping[str, FileEntry]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    name: CheckpointName
    directory: str
    manifest: Manifest


# --------------------------------------------------------------------------------------------------------------------
# Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """``max_tokens`` None: until the context is full. ``top_k`` -1: off. ``temperature`` 0: greedy.

    ``stop`` None: the model's end tokens only; (): nothing stops, not even the end token; token ids; or strings
    (a stop that was met is part of the returned tokens, once). ``seed`` None: a fresh one.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[int, ...] | tuple[str, ...] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorData:
    """Numbers of ``shape``, dense or CSR, as the SDK has it: ``data`` flat, row by row; with ``sparse_crow_indices``
    int64 [rows + 1] and ``sparse_col_indices`` int64 [cells] only the cells that these name."""

    data: Int64 | Float32
    shape: tuple[int, ...]
    sparse_crow_indices: Int64 | None = None
    sparse_col_indices: Int64 | None = None

    def row_starts(self) -> Int64:
        """Where each row's numbers begin in ``data``, and their end: int64 [rows + 1], of two dims."""
        if self.sparse_crow_indices is not None:
            return self.sparse_crow_indices
        rows, cols = self.shape
        return np.arange(rows + 1, dtype=np.int64) * cols


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """``version`` None samples the base model. Scores, each on demand (N tokens of prompt; position 0 has none):

    ``prompt_logprobs``: the prompt's own tokens; ``topk_prompt_logprobs``: the k likeliest at each position; with
    ``prompt_logprobs_last_n`` both only at the last n. ``target_prompt_logprobs`` int64 [N - 1, K]: the tokens that row
    i names at position i + 1, -1 for none. ``prompt_alt_tokens_k``: tokens sampled at each position, at the request's
    temperature without cuts. ``topk_sample_logprobs``: the k likeliest at each sampled token.

    ``inflight``: begins with the newest published version of the model that is no older than ``version``, and goes on
    with newer ones as they are published, keys and values kept.

    ``owner``: whose it is; running sequences and pages are shared by owner. ``prefix_scope``: what its prompt begins
    with is found computed, and kept to be found, among requests of the same scope alone.
    """

    request_id: str
    version: Version | None
    prompt: ModelInput
    num_samples: int
    sampling_params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    topk_sample_logprobs: int = 0
    stream: bool = False
    inflight: bool = False
    owner: str = ""
    prefix_scope: str = ""


SamplerKind = Literal["snapshot", "inflight"]
"""Of a sampling client: it keeps the weights it was made with, or follows its model's newest published ones."""

StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """``tokens`` int32 [S] with the stop included; ``logprobs`` float32 [S] of the temperature-scaled distribution
    before top-k and top-p cut it; ``topk_logprobs`` [S, K] of the same."""

    tokens: Int32
    logprobs: Float32
    stop_reason: StopReason
    topk_logprobs: TopK | None = None


EMPTY_TOPK = (0, -99999.0)
"""The protocol's empty cell of a ``TopK``: token id and log-probability."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopK:
    """``token_ids`` int32 [N, K], ``logprobs`` float32 [N, K], falling; cells without a token are ``EMPTY_TOPK``."""

    token_ids: Int32
    logprobs: Float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptAltTokens:
    """``tokens`` int64 [N - 1, k] sampled at positions 1 and up, ``logprobs`` float32 of the same shape."""

    tokens: Int64
    logprobs: Float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScores:
    """What was asked for, None what was not; all log-probabilities at temperature 1.

    ``logprobs`` float32 [N], NaN where not computed (always at position 0); ``topk`` [N, K], empty rows there.
    ``target_logprobs``: float32 in the request's shape and layout, 0.0 in cells of -1.
    """

    logprobs: Float32 | None = None
    topk: TopK | None = None
    target_logprobs: TensorData | None = None
    alt_tokens: PromptAltTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDelta:
    """A step forward of one request. ``version`` says which weights made its tokens.

    Not streaming: one delta per sample, at its end, with all its tokens; one more whenever its weights change
    (``SampleRequest.inflight``). Streaming: several; ``tokens``, ``logprobs`` and ``topk_logprobs`` are the new ones'.
    ``prompt`` comes once, with the first delta of the request that knows it. ``stop_reason`` is set on a sample's last
    delta. ``prompt_cache_hit_tokens`` is set on the request's first delta: how many of the prompt's tokens were not
    computed for its first sample, since their keys and values were there. What samples have from one another does not
    count.
    """

    request_id: str
    sample: int
    tokens: Int32
    logprobs: Float32
    stop_reason: StopReason | None
    version: Version | None
    prompt: PromptScores | None = None
    prompt_cache_hit_tokens: int = 0
    topk_logprobs: TopK | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """A finished request, folded from its deltas. ``sequences[i]`` is sample i."""

    sequences: tuple[SampledSequence, ...]
    prompt: PromptScores | None
    versions: tuple[Version, ...]
    prompt_cache_hit_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    prompt_logprobs: bool = True
    target_prompt_logprobs: bool = True
    max_topk_prompt_logprobs: int = 20
    max_topk_sample_logprobs: int = 20
    max_prompt_alt_tokens_k: int = 20
    max_num_samples: int = 1024
    max_num_seqs: int = 64
    """Sequences decoding at once."""
    shares_rows: bool = True
    """Whether it computes with the trainer's own rows, so that a snapshot for it alone needs no bytes."""
    samples: frozenset[TrainableKind] = frozenset(("lora",))
    """The kinds of models whose versions it takes."""


# --------------------------------------------------------------------------------------------------------------------
# Futures


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureKey:
    """What makes a submission the same submission: one of the protocol's five pairs, scoped by its kind.

    train (model_id, seq_id); create (session_id, model_seq_id); sampler (session_id, sampling_session_seq_id);
    sample (sampling_session_id, seq_id); custom_loss (session_id, custom_loss_seq_id).
    """

    kind: Literal["train", "create", "sampler", "sample", "custom_loss"]
    scope: str
    seq_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A result in the bytes that go out. Made once, when the future resolves; kept as it is."""

    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FutureState:
    """``encoded`` None: pending. A failure is an answer like any other (``failed`` says which it was)."""

    request_id: str
    owner: str
    base: str
    key: FutureKey
    operation: str
    encoded: Encoded | None
    failed: bool = False


# --------------------------------------------------------------------------------------------------------------------
# The journal


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBody:
    """A request's body as it came: ``encoding`` is its ``Content-Encoding``."""

    data: bytes
    encoding: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRecord:
    """What a command is made from again after a death: the ``operation`` with its ``arguments``, as JSON has them, and
    for a forward or a backward the ``body`` that came. A body that is too large for the database lies in the file of
    this name instead (``file``). ``num_bytes``: of the body."""

    model_id: str
    seq_id: int
    operation: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    body: RequestBody | None = None
    file: str | None = None
    num_bytes: int = 0


# --------------------------------------------------------------------------------------------------------------------
# Answers: what a client's future resolves with


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSaved:
    """``has_pending_gradient``: from backwards since the last step. The model keeps it; the checkpoint has none."""

    path: str
    has_pending_gradient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerWeightsSaved:
    """``path`` for a named save, ``sampling_session_id`` for an ephemeral one."""

    path: str | None
    sampling_session_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    path: str
    model_id: str


Answer = (
    ModelCreated
    | ForwardBackwardOutput
    | OptimStepOutput
    | WeightsSaved
    | SamplerWeightsSaved
    | WeightsLoaded
    | SampleOutput
)
