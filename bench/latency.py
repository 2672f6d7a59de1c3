"""What training costs whoever samples beside it, and how soon new weights are sampled. Through a rank's turn loop.

    python bench/latency.py [gaps] [update] [--shape tiny] [--sequences 8] [--tokens 60] [--microbatch-tokens 2048]
                            [--update-sequences 64] [--rounds 7] [--threads N] [--json FILE]

``gaps``: milliseconds between two tokens of one sequence, all of ``--sequences``, idle and while another tenant trains
without a pause. The bound is one microbatch and one decode step, each measured alone in the same process (medians);
``meanwhile``: the same of the time in which the gaps were measured (the microbatches' 95th percentile), for machines
that others work on too.

``update``: ``--update-sequences`` requests follow a model's newest weights (``inflight``); its optimiser step and the
snapshot behind it are sent together, the publication when the snapshot is there. Tokens are the rank's then, who asked
for them is told at a sequence's end, as by the service. ``added``: from the turn of the step to the first token of the
new weights, less an optimiser step alone and the decode step that the token takes anyway.
``added_in_the_turn``: of this what that turn took longer than an optimiser step alone: the snapshot, and on CUDA what
was left of the step that the device was ahead with, which was begun before it. ``steps_between``: decode steps that
ended from that turn's beginning to that token, its own included. ``rows_turns``: turns that step and snapshot took.
``stall``: the longest gap of that time less the turn of the step, in decode steps; 1 is no stall.

The server's socket and process lie outside: some 0.2 ms for the publication's way there and back.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from descant.model.load import ModelSource, load_model
from descant.ranks.channel import TurnStatus
from descant.ranks.loop import TurnLoop
from descant.ranks.ops import (
    Cancel,
    Microbatch,
    Operation,
    Publish,
    RankRequest,
    RankResponse,
    Release,
    Rows,
    Sample,
    SampleStep,
    Stop,
)
from descant.ranks.settings import ReplicaSettings, SampleSettings, TrainSettings
from descant.ranks.worker import Worker
from descant.testing.executor import Around
from descant.testing.shapes import SHAPES, shaped_model
from descant.testing.tiny import tiny_model
from descant.types import (
    AdamParams,
    Command,
    CreateModel,
    Datum,
    EncodedText,
    ForwardBackward,
    Lora,
    OptimStep,
    Result,
    SampleRequest,
    SamplingParams,
    Snapshot,
    SnapshotRef,
    Version,
)

LONGEST_WAIT_S = 600.0
SEQUENCE_TOKENS = 128
"""Of a training datum."""


KINDS: dict[type[Operation[Any]], str] = {Microbatch: "microbatch", SampleStep: "step", Rows: "rows"}


class Timed(Around):
    """Notes when each turn began and ended."""

    def __init__(self, worker: Worker):
        super().__init__(worker)
        self._device = worker.model.device
        self.turns: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.waits = False
        """For the device, so that a turn's end is its computation's: only where turns are measured alone."""
        self.emitted: dict[int, list[tuple[float, Version | None]]] = defaultdict(list)
        """By sequence: when each token was there, and what had computed it."""

    def execute(self, op: Operation[Any]) -> Any:
        if (kind := KINDS.get(type(op))) is None:
            return super().execute(op)
        start = time.perf_counter()
        outcome = super().execute(op)
        if self.waits and self._device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.turns[kind].append((start, now))
        if kind == "step":
            for output in itertools.chain.from_iterable(part for part in outcome if isinstance(part, list)):
                self.emitted[output.sequence] += [(now, output.version)] * len(output.tokens)
        return outcome

    def milliseconds(self, kind: str) -> list[float]:
        return [1000 * (end - start) for start, end in self.turns[kind]]

    def sequences(self) -> list[list[tuple[float, Version | None]]]:
        """The tokens of each."""
        return list(self.emitted.values())

    def gaps(self, start: float, end: float) -> list[float]:
        """Milliseconds between two tokens of a sequence that both came in this time."""
        found = []
        for tokens in self.sequences():
            times = [at for at, _ in tokens if start <= at <= end]
            found += [1000 * (b - a) for a, b in itertools.pairwise(times)]
        return found


class Desk:
    """A client on a turn loop: what it sent, and when what came back."""

    def __init__(self, worker: Timed, settings: ReplicaSettings):
        self.loop = TurnLoop(
            worker,
            respond=self._take,
            turn_status=TurnStatus(),
            time_share=settings.sample.time_share,
            max_pass_s=settings.train.max_pass_ms / 1000,
        )
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()
        self._answers: dict[int, tuple[float, Any]] = {}
        self._then: dict[int, Callable[[Any], None]] = {}
        self._calls = self._seq_ids = 0

    def _take(self, response: RankResponse) -> None:
        now, call = time.perf_counter(), response.id
        if response.error is None and (then := self._then.pop(call, None)) is not None:
            then(response.result)
        self._answers[call] = now, response.result if response.error is None else response.error

    @staticmethod
    def until(fact: Callable[[], bool]) -> None:
        """Looks now and then, so that it hardly takes the interpreter from the loop's thread."""
        deadline = time.perf_counter() + LONGEST_WAIT_S
        while not fact():
            assert time.perf_counter() < deadline, "it took too long"
            time.sleep(0.01)

    def call(self, op: Command | Operation[Any], then: Callable[[Any], None] | None = None) -> int:
        self._calls += 1
        if then is not None:
            self._then[self._calls] = then
        self.loop.post(RankRequest(id=self._calls, op=op))
        return self._calls

    def send(self, command: Command, then: Callable[[Any], None] | None = None) -> int:
        self._seq_ids += 1
        if not isinstance(command, CreateModel):
            command = replace(command, seq_id=self._seq_ids)
        return self.call(command, then)

    def answer(self, call: int) -> tuple[float, Result]:
        self.until(lambda: call in self._answers)
        at, result = self._answers.pop(call)
        if isinstance(result, Exception):
            raise result
        return at, result

    def sample(self, name: str, count: int, prompt_tokens: int, tokens: int, version: Version | None) -> None:
        for index in range(count):
            prompt = np.random.default_rng(index).integers(3, 200, prompt_tokens).astype(np.int32)
            request = SampleRequest(
                request_id=f"{name}-{index}",
                version=version,
                prompt=(EncodedText(tokens=prompt),),
                num_samples=1,
                sampling_params=SamplingParams(max_tokens=tokens, seed=index, stop=()),
                inflight=version is not None,
            )
            self.loop.post(RankRequest(id=0, op=Sample(request=request)))

    def close(self) -> None:
        self.loop.post(RankRequest(id=0, op=Stop()))
        self._thread.join(LONGEST_WAIT_S)


def training_data(tokens: int) -> tuple[Datum, ...]:
    random = np.random.default_rng(0)
    rows = random.integers(3, 200, (max(1, tokens // SEQUENCE_TOKENS), SEQUENCE_TOKENS + 1))
    return tuple(
        Datum(
            model_input=(EncodedText(tokens=row[:-1].astype(np.int32)),),
            loss_fn_inputs={"target_tokens": row[1:].astype(np.int64)},
        )
        for row in rows
    )


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, 100 * share))


def gaps_beside_training(desk: Desk, worker: Timed, options: argparse.Namespace) -> dict[str, float]:
    data = training_data(options.microbatch_tokens)
    backward = ForwardBackward(model_id="trained", seq_id=0, data=data, loss_fn="cross_entropy")
    desk.answer(desk.send(CreateModel(model_id="trained", trainable=Lora(rank=8, seed=0))))
    worker.waits = True
    for _ in range(2):
        desk.answer(desk.send(backward))  # compiles
    worker.turns.clear()
    for call in [desk.send(backward) for _ in range(5)]:
        desk.answer(call)
    microbatch = statistics.median(worker.milliseconds("microbatch"))
    worker.waits = False

    room = options.context - options.prompt_tokens
    worker.emitted.clear()
    desk.sample("gaps", options.sequences, options.prompt_tokens, min(room, 20 * options.tokens), None)

    def sampled() -> int:
        found = worker.sequences()
        return min(map(len, found)) if len(found) == options.sequences else 0

    def during(tokens: int) -> tuple[float, float]:
        begun = sampled()
        start = time.perf_counter()
        desk.until(lambda: sampled() >= begun + tokens)
        return start, time.perf_counter()

    during(5)
    worker.turns.clear()
    idle = worker.gaps(*during(options.tokens))
    step = statistics.median(worker.milliseconds("step"))
    training = True

    def again(_: object) -> None:
        if training:
            desk.send(backward, again)

    for _ in range(3):
        desk.send(backward, again)
    during(5)
    worker.turns.clear()
    busy = worker.gaps(*during(options.tokens))
    passes, step_meanwhile = worker.milliseconds("microbatch"), percentile(worker.milliseconds("step"), 0.5)
    training = False
    for index in range(options.sequences):
        desk.loop.post(RankRequest(id=0, op=Cancel(request_id=f"gaps-{index}")))
    bound = microbatch + step
    return {
        "sequences": options.sequences,
        "microbatch_ms": microbatch,
        "step_ms": step,
        "idle_p50_ms": percentile(idle, 0.5),
        "idle_p95_ms": percentile(idle, 0.95),
        "training_p50_ms": percentile(busy, 0.5),
        "training_p95_ms": percentile(busy, 0.95),
        "training_max_ms": max(busy),
        "microbatches_meanwhile": len(passes),
        "microbatch_meanwhile_p95_ms": percentile(passes, 0.95),
        "bound_ms": bound,
        "p95_of_bound": percentile(busy, 0.95) / bound,
        "p95_of_bound_meanwhile": percentile(busy, 0.95) / (percentile(passes, 0.95) + step_meanwhile),
    }


def weights_that_follow(desk: Desk, worker: Timed, options: argparse.Namespace) -> dict[str, float]:
    data = training_data(min(options.microbatch_tokens, SEQUENCE_TOKENS))
    backward = ForwardBackward(model_id="followed", seq_id=0, data=data, loss_fn="cross_entropy")
    step = OptimStep(model_id="followed", seq_id=0, adam_params=AdamParams(learning_rate=1e-4))
    snapshot = Snapshot(model_id="followed", seq_id=0, kind="sampler", for_disk=False, to_publish=True)
    desk.answer(desk.send(CreateModel(model_id="followed", trainable=Lora(rank=16, seed=0))))
    worker.waits = True
    alone = []
    for _ in range(4):
        desk.answer(desk.send(backward))
        worker.turns.clear()
        desk.answer(desk.send(step))
        alone += worker.milliseconds("rows")
    worker.waits = False
    optimiser = statistics.median(alone[1:])
    _, ref = desk.answer(desk.send(snapshot))
    assert isinstance(ref, SnapshotRef)
    desk.answer(desk.call(Publish(ref=ref)))  # type: ignore[misc]

    count = options.update_sequences
    room = options.context - options.prompt_tokens
    worker.emitted.clear()
    desk.sample("update", count, options.prompt_tokens, min(room, 40 * (options.rounds + 2)), ref.version)

    def since(start: float) -> int:
        """Tokens that the slowest sequence has had since."""
        return min(sum(at >= start for at, _ in tokens[-40:]) for tokens in worker.sequences())

    desk.until(lambda: len(worker.emitted) == count and all(len(tokens) >= 3 for tokens in worker.sequences()))
    added, before, stalls, steps, between, rows_turns = [], [], [], [], [], []
    for _ in range(options.rounds):
        desk.answer(desk.send(backward))
        worker.turns.clear()
        quiet = time.perf_counter()
        desk.until(lambda quiet=quiet: since(quiet) >= 6)  # type: ignore[misc]
        bare = statistics.median(worker.milliseconds("step"))
        steps.append(bare)
        worker.turns.clear()

        def publish(ref: SnapshotRef) -> None:
            desk.call(Publish(ref=ref))

        begun, old = time.perf_counter(), ref.version
        desk.send(step)
        _, ref = desk.answer(desk.send(snapshot, publish))
        assert isinstance(ref, SnapshotRef)
        desk.until(lambda ref=ref: all(tokens[-1][1] == ref.version for tokens in worker.sequences()))  # type: ignore[misc]
        first = min(at for tokens in worker.sequences() for at, version in tokens[-40:] if version == ref.version)
        rows = worker.turns["rows"]
        turn = 1000 * sum(end - start for start, end in rows)
        before.append(turn - optimiser)
        rows_turns.append(len(rows))
        between.append(sum(rows[0][0] <= end <= first for _, end in worker.turns["step"]))
        added.append(1000 * (first - rows[0][0]) - optimiser - bare)
        after = time.perf_counter()
        desk.until(lambda after=after: since(after) >= 2)  # type: ignore[misc]
        stalls.append((max(worker.gaps(begun - bare / 1000, time.perf_counter())) - turn) / bare)
        # As the service does. With every version kept, the slab would grow, and steps be captured anew.
        desk.answer(desk.call(Release(version=old)))  # type: ignore[misc]
    for index in range(count):
        desk.loop.post(RankRequest(id=0, op=Cancel(request_id=f"update-{index}")))
    return {
        "sequences": count,
        "optimiser_step_ms": optimiser,
        "step_ms": statistics.median(steps),
        "added_ms": statistics.median(added),
        "added_max_ms": max(added),
        "added_in_the_turn_ms": statistics.median(before),
        "steps_between": statistics.median(between),
        "steps_between_max": max(between),
        "rows_turns_max": max(rows_turns),
        "stall_steps": statistics.median(stalls),
        "stall_max_steps": max(stalls),
    }


MEASUREMENTS = {"gaps": gaps_beside_training, "update": weights_that_follow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--shape", choices=["tiny", *SHAPES], default="tiny")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--microbatch-tokens", type=int, help="of a pass; a rank's own unless set")
    parser.add_argument("--update-sequences", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = ReplicaSettings(
        train=TrainSettings(microbatch_tokens=options.microbatch_tokens),
        sample=SampleSettings(
            max_num_seqs=max(options.sequences, options.update_sequences), max_num_batched_tokens=2048
        ),
    )
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        if options.shape == "tiny":
            tiny_model("llama", directory)
        else:
            shaped_model(options.shape, directory, device=device)
        model = load_model(ModelSource(name=options.shape, directory=directory), device=device)
    options.context = model.facts.max_context_length
    worker = Timed(Worker(model, settings))
    options.microbatch_tokens = worker.info.microbatch_tokens
    gc.collect()
    gc.freeze()  # as a rank does
    desk = Desk(worker, settings)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{card}, torch {torch.__version__}, {options.shape}, {model.dtype}", flush=True)
    found = {}
    for name in options.names or MEASUREMENTS:
        found[name] = MEASUREMENTS[name](desk, worker, options)
        print(name, {key: round(value, 3) for key, value in found[name].items()}, flush=True)
    desk.close()
    if options.json:
        options.json.write_text(
            json.dumps({"card": card, "torch": torch.__version__, **vars(options), **found}, default=str)
        )


if __name__ == "__main__":
    main()
