"""Measurements, each beside its baseline in the same run, alternated, medians of both.

``roofline`` is what the frozen linear layers alone allow on this machine: their matrix products, timed in the same run,
with nothing in between. A fraction of 1 would mean that attention, adapters, sampling and Python cost nothing.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from descant.errors import ServerError, UserError

if TYPE_CHECKING:
    import torch

    from descant.model.base import BaseModel
    from descant.model.load import ModelSource
    from descant.types import Version

ROUNDS = 5
NUM_SEQUENCES = 8
SEQUENCE_TOKENS = 128
SAMPLE_PROMPT_TOKENS = 32
SAMPLE_TOKENS = 64
RANK = 8
SAMPLE_RANK = 16
LOAD = Path(__file__).parents[1] / "bench" / "load.py"
LOAD_OPTIONS = ("--quick",)
LOAD_DEADLINE_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    id: str
    what: str
    value: float
    unit: str
    baseline: float
    ratio: float
    """value / baseline"""
    roofline: float
    fraction_of_roofline: float
    device: str
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every measurement gets: Descant's model, and a plain transformers one of the same weights and dtype."""

    source: ModelSource
    model: BaseModel
    plain: Any

    def row(self, *, id: str, what: str, unit: str, value: float, baseline: float, roofline: float) -> BenchRow:
        import torch

        return BenchRow(
            id=id,
            what=what,
            unit=unit,
            value=value,
            baseline=baseline,
            ratio=value / baseline,
            roofline=roofline,
            fraction_of_roofline=value / roofline,
            device=_device(self.model),
            torch=torch.__version__,
        )


def run_bench(names: Sequence[str], *, model: str, json_file: Path | None) -> None:
    """Prints a table, and writes the rows as JSON. Raises ``UserError`` for a name that is none of ``MEASUREMENTS``."""
    for name in names:
        if name not in MEASUREMENTS:
            raise UserError(f"there is no measurement {name!r}; there are {', '.join(MEASUREMENTS)}")
    console = Console()
    bench = _prepare(model)
    rows = [MEASUREMENTS[name](bench) for name in names or MEASUREMENTS]
    console.print(_table(rows))
    for row in rows:
        console.print(f"{row.id}: {row.what}", highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def _prepare(name: str) -> Bench:
    import transformers

    from descant.model.load import load_model, resolve_model

    transformers.utils.logging.disable_progress_bar()
    source = resolve_model(name)
    model = load_model(source)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(source.directory, dtype=model.dtype)
    return Bench(source=source, model=model, plain=plain.to(model.device).eval())


def _table(rows: Sequence[BenchRow]) -> Table:
    table = Table(Column("id", no_wrap=True), "value", "unit", "baseline", "ratio", "roofline", "of roofline")
    for row in rows:
        table.add_row(
            row.id,
            f"{row.value:.0f}",
            row.unit,
            f"{row.baseline:.0f}",
            f"{row.ratio:.2f}",
            f"{row.roofline:.0f}",
            f"{row.fraction_of_roofline:.0%}",
        )
    if rows:
        table.caption = f"{rows[0].device}, torch {rows[0].torch}; medians of {ROUNDS} alternated rounds"
    return table


def _device(model: BaseModel) -> str:
    import torch

    dtype = str(model.dtype).removeprefix("torch.")
    if model.device.type == "cuda":
        return f"{torch.cuda.get_device_name(model.device)}, {dtype}"
    return f"{_cpu_name()}, {torch.get_num_threads()} threads, {dtype}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def alternate(
    work: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int | None = None, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each in every round (``ROUNDS`` of them), one after another, after rounds that warm up."""
    import torch

    seconds: dict[str, list[float]] = {name: [] for name in work}
    for round_number in range((ROUNDS if rounds is None else rounds) + warm_up):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_number >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the rounds' ratios: what slows a whole round is in both of its figures."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def linear_products(network: Any, num_tokens: int, *, backward: bool) -> Callable[[], None]:
    """The products of all linear layers of a model with ``num_tokens`` rows: x Wᵀ, and dy W for a backward. By the
    library that Descant takes."""
    import torch

    from descant.model.cpu import prepacked

    weights = [module.weight.detach() for module in network.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {
        size: torch.randn(num_tokens, size, dtype=weights[0].dtype, device=weights[0].device)
        for weight in weights
        for size in weight.shape
    }

    @torch.inference_mode()
    def run() -> None:
        for weight in weights:
            prepacked.product(inputs[weight.shape[1]], weight, None, None)
            if backward:
                prepacked.product_backward(inputs[weight.shape[0]], weight)

    return run


# --------------------------------------------------------------------------------------------------------------------
# The measurements


def train_tokens_per_s(bench: Bench) -> BenchRow:
    """One adapter, ``forward_backward`` and ``optim_step``, against a plain transformers + peft loop on one batch."""
    import numpy as np
    import torch

    from descant.train.passes import TorchPassRunner
    from descant.train.requests import Learner
    from descant.train.runner import Part
    from descant.types import AdamParams, Datum, EncodedText, ForwardBackward, Lora

    try:
        import peft
    except ImportError:
        raise UserError("train_tokens_per_s measures against peft, which is not installed: pip install peft") from None
    model, device = bench.model, bench.model.device
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, model.facts.vocab_size, (NUM_SEQUENCES, SEQUENCE_TOKENS + 1), dtype=np.int64)

    model_id = "bench:train:0"
    model.bank.create(model_id, Lora(rank=RANK, seed=0, train_unembed=False))
    learner = Learner(TorchPassRunner(model))
    data = tuple(
        Datum(
            model_input=(EncodedText(tokens=row[:-1].astype(np.int32)),),
            loss_fn_inputs={"target_tokens": row[1:], "weights": np.ones(SEQUENCE_TOKENS, np.float32)},
        )
        for row in tokens
    )
    seq_ids = iter(range(1, 1_000_000))

    def ours() -> None:
        command = ForwardBackward(model_id=model_id, seq_id=next(seq_ids), data=data, loss_fn="cross_entropy")
        request = learner.open(command)
        learner.run([Part(request=request, datum=index) for index in range(len(data))])
        learner.close(request)
        learner.optim_step(model_id, AdamParams(learning_rate=1e-5))

    num_tokens = NUM_SEQUENCES * SEQUENCE_TOKENS
    roofline = linear_products(bench.plain, num_tokens, backward=True)  # before peft adds its own linear layers
    config = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0)
    adapted: Any = peft.get_peft_model(bench.plain, config)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    inputs = torch.from_numpy(tokens[:, :-1]).to(device)
    targets = torch.from_numpy(tokens[:, 1:]).to(device)

    def theirs() -> None:
        logits = adapted(input_ids=inputs, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    try:
        seconds = medians(alternate({"baseline": theirs, "value": ours, "roofline": roofline}, device))
    finally:
        adapted.unload()
        model.bank.delete(model_id)
    return bench.row(
        id="train_tokens_per_s",
        what=f"forward_backward + optim_step, {NUM_SEQUENCES} × {SEQUENCE_TOKENS} tokens, rank {RANK}; "
        "baseline: transformers + peft",
        unit="tokens/s",
        value=num_tokens / seconds["value"],
        baseline=num_tokens / seconds["baseline"],
        roofline=num_tokens / seconds["roofline"],
    )


class _SampleWorkload:
    """Batches of ``NUM_SEQUENCES`` equal prompts through the scheduler and the sampler."""

    def __init__(self, model: BaseModel):
        import numpy as np

        from descant.model.forward_batch import PAGE_TOKENS
        from descant.sample.plan import SampleLimits
        from descant.sample.runner import Sampler
        from descant.sample.scheduler import Scheduler

        size = (NUM_SEQUENCES, SAMPLE_PROMPT_TOKENS)
        self.prompts = np.random.default_rng(0).integers(0, model.facts.vocab_size, size, dtype=np.int32)
        num_pages = 2 * NUM_SEQUENCES * (1 + (SAMPLE_PROMPT_TOKENS + SAMPLE_TOKENS) // PAGE_TOKENS)
        limits = SampleLimits(
            max_num_seqs=NUM_SEQUENCES,
            num_pages=num_pages,
            max_num_batched_tokens=NUM_SEQUENCES * SAMPLE_PROMPT_TOKENS,
            max_queued_requests=NUM_SEQUENCES,
            max_context_length=model.facts.max_context_length,
            vocab_size=model.facts.vocab_size,
            eos_token_ids=model.facts.eos_token_ids,
        )
        tokenizer: Any = model.tokenizer()
        self._numbers = itertools.count()
        self._scheduler = Scheduler(limits, decode_text=tokenizer.decode, fresh_seed=lambda: next(self._numbers))
        self._sampler = Sampler(model, num_pages=num_pages)

    def run(self, versions: Sequence[Version | None]) -> None:
        """One request a prompt, each of the next version."""
        from descant.types import EncodedText, SampleRequest, SamplingParams

        for prompt, version in zip(self.prompts, itertools.cycle(versions)):
            self._sampler.pin(version)
            request = SampleRequest(
                request_id=f"bench-{next(self._numbers)}",
                version=version,
                prompt=(EncodedText(tokens=prompt),),
                num_samples=1,
                sampling_params=SamplingParams(max_tokens=SAMPLE_TOKENS, stop=()),
            )
            self._scheduler.add(request)
        while (plan := self._scheduler.plan()) is not None:
            self._scheduler.apply(plan, self._sampler.step(plan))
        for _, version in zip(self.prompts, itertools.cycle(versions)):
            self._sampler.unpin(version)


def _sampling_roofline(bench: Bench) -> Callable[[], None]:
    step = linear_products(bench.plain, NUM_SEQUENCES, backward=False)

    def roofline() -> None:
        for _ in range(SAMPLE_TOKENS):
            step()

    return roofline


def sample_tokens_per_s(bench: Bench) -> BenchRow:
    """A batch of equal prompts sampled from the base model, against ``transformers.generate`` on the same batch."""
    import torch

    model, device = bench.model, bench.model.device
    sampling = _SampleWorkload(model)
    inputs = torch.from_numpy(sampling.prompts.astype("int64")).to(device)

    @torch.inference_mode()
    def theirs() -> None:
        bench.plain.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=SAMPLE_TOKENS,
            max_new_tokens=SAMPLE_TOKENS,
            pad_token_id=model.facts.eos_token_ids[0],
        )

    work = {"baseline": theirs, "value": lambda: sampling.run([None]), "roofline": _sampling_roofline(bench)}
    seconds = medians(alternate(work, device))
    num_tokens = NUM_SEQUENCES * SAMPLE_TOKENS
    return bench.row(
        id="sample_tokens_per_s",
        what=f"{NUM_SEQUENCES} sequences at once, {SAMPLE_TOKENS} tokens each after {SAMPLE_PROMPT_TOKENS}; "
        "baseline: transformers.generate",
        unit="tokens/s",
        value=num_tokens / seconds["value"],
        baseline=num_tokens / seconds["baseline"],
        roofline=num_tokens / seconds["roofline"],
    )


def sample_adapters_tokens_per_s(bench: Bench) -> BenchRow:
    """The same batch with an adapter for each sequence, against the base model alone."""
    import torch

    from descant.types import Lora, Version

    model, bank = bench.model, bench.model.bank
    versions: list[Version] = []
    for number in range(NUM_SEQUENCES):
        model_id = f"bench:sample:{number}"
        bank.create(model_id, Lora(rank=SAMPLE_RANK, seed=number))
        generator = torch.Generator(model.device).manual_seed(number)
        bank.weights(model_id).normal_(std=0.01, generator=generator)
        bank.refresh_compute(model_id)
        versions.append(Version(model_id=model_id, number=1))
        bank.publish(model_id, versions[-1])
        bank.delete(model_id)
    sampling = _SampleWorkload(model)
    work = {
        "baseline": lambda: sampling.run([None]),
        "value": lambda: sampling.run(versions),
        "roofline": _sampling_roofline(bench),
    }
    try:
        seconds = medians(alternate(work, model.device))
    finally:
        for version in versions:
            bank.release(version)
    num_tokens = NUM_SEQUENCES * SAMPLE_TOKENS
    return bench.row(
        id="sample_adapters_tokens_per_s",
        what=f"the same with {NUM_SEQUENCES} adapters of rank {SAMPLE_RANK}, one a sequence; baseline: the base alone",
        unit="tokens/s",
        value=num_tokens / seconds["value"],
        baseline=num_tokens / seconds["baseline"],
        roofline=num_tokens / seconds["roofline"],
    )


def load_tokens_per_s(bench: Bench) -> BenchRow:
    """Clients of the SDK, out of step, through a server (``bench/load.py``), against the same work in lockstep."""
    if not LOAD.exists():
        raise UserError(f"load_tokens_per_s runs from a clone of the repository: there is no {LOAD}")
    if importlib.util.find_spec("tinker") is None:
        raise UserError("load_tokens_per_s has clients of the SDK, which is not installed: pip install tinker")
    with tempfile.TemporaryDirectory() as directory:
        json_file = Path(directory, "rows.json")
        paths = ("--shape", str(bench.source.directory), "--json", str(json_file))
        command = [sys.executable, str(LOAD), *LOAD_OPTIONS, *paths]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            code = process.wait(LOAD_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise ServerError(f"the load was not measured after {LOAD_DEADLINE_S:.0f} s") from None
        finally:
            process.terminate()  # it ends what it started
            process.wait()
        if code:
            raise ServerError(f"the load ended with code {code}")
        rows = {row["id"].partition("@")[0]: row for row in json.loads(json_file.read_text())}
    served = [rows[f"{name}_tokens_per_s"] for name in ("sampled", "trained")]
    baseline = sum(row["baseline"] for row in served)
    return bench.row(
        id="load_tokens_per_s",
        what="sampled and trained by clients of the SDK, out of step, through a server; baseline: the same work in "
        "lockstep, by a rank's worker",
        unit="tokens/s",
        value=sum(row["value"] for row in served),
        baseline=baseline,
        roofline=baseline / rows["lockstep_linear_s"]["ratio"],
    )


MEASUREMENTS: Mapping[str, Callable[[Bench], BenchRow]] = {
    "train_tokens_per_s": train_tokens_per_s,
    "sample_tokens_per_s": sample_tokens_per_s,
    "sample_adapters_tokens_per_s": sample_adapters_tokens_per_s,
    "load_tokens_per_s": load_tokens_per_s,
}
