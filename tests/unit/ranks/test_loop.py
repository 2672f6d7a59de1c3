"""The loop around the decision, on a tiny real model: who waits for whom, and what a broken turn takes with it."""

from __future__ import annotations

import asyncio
import math
import os
import queue
import signal
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from descant.errors import DescantError, RankDied, ServerError, UserError
from descant.ranks.channel import TurnStatus
from descant.ranks.loop import QUIET_S, TurnLoop
from descant.ranks.ops import (
    Microbatch,
    Operation,
    Pin,
    Publish,
    RankRequest,
    RankResponse,
    Rows,
    Sample,
    SampleStep,
    Stats,
    Stop,
)
from descant.ranks.peers import Peers
from descant.ranks.replica import Replica
from descant.ranks.settings import RankSpec, ReplicaSettings
from descant.ranks.worker import Worker
from descant.testing.engine import frozen, near, request, sampled
from descant.testing.executor import Around
from descant.testing.ranks import SETTINGS, build_tiny, changed
from descant.testing.tiny import tiny_model
from descant.testing.trainer import OTHER_DATA, Model, close, datum, error, result, saved
from descant.types import (
    AdamParams,
    CheckpointSource,
    Command,
    CreateModel,
    Datum,
    ForwardBackward,
    ForwardBackwardOutput,
    Lora,
    OptimStep,
    SampleDelta,
    Snapshot,
    SnapshotRef,
    Version,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny"))


class Seen(Around):
    """Notes the operations; ``sabotage`` says which of a kind, counted from 1, breaks."""

    def __init__(self, worker: Worker):
        super().__init__(worker)
        self.worker = worker
        assert worker.train is not None
        self.learner = worker.train.learner
        self.turns: list[Any] = []
        self.under_way: list[tuple[bool, bool]] = []
        """Of each pass: whether somebody sampled meanwhile, and whether its turn ended before it was looked at."""
        self.sabotage: dict[type[Operation[Any]], int] = {}
        self.reads: Callable[[CheckpointSource], Any] = worker.read

    def execute(self, op: Operation[Any]) -> Any:
        if isinstance(op, Microbatch | SampleStep | Rows | Pin | Publish):
            self.turns.append(op)
        self.sabotage[type(op)] = self.sabotage.get(type(op), 0) - 1
        if self.sabotage[type(op)] == 0:
            raise RuntimeError(f"{type(op).__name__}: secret detail")
        outcome = super().execute(op)
        if isinstance(op, Microbatch):
            self.under_way.append((op.sampling, self.learner.has_launched_pass))
        return outcome

    def read(self, source: CheckpointSource) -> Any:
        return self.reads(source)

    def stats(self) -> Mapping[str, float]:
        return self.inner.execute(Stats())


def seen_worker(tiny: Path, settings: ReplicaSettings = SETTINGS) -> Seen:
    return Seen(build_tiny(RankSpec(model=str(tiny), settings=settings), lambda phase: None, Peers()))


@pytest.fixture
async def rank(tiny: Path) -> AsyncIterator[tuple[Replica, Seen]]:
    made: list[Seen] = []

    def build(phase: Any) -> Seen:
        made.append(seen_worker(tiny))
        return made[0]

    replica = await Replica.in_process(build, SETTINGS)
    yield replica, made[0]
    await replica.close()


async def test_requests_of_many_models_share_turns_within_the_budget_and_no_passes(rank: tuple[Replica, Seen]) -> None:
    replica, seen = rank
    models = [Model(replica, f"m{i}") for i in range(4)]
    await asyncio.gather(*(result(model.create()) for model in models))
    seen.turns.clear()
    data = (datum([1, 2, 3, 4]),) * 2
    await asyncio.gather(*(result(model.backward(data)) for model in models for _ in range(2)))
    turns = [turn for turn in seen.turns if isinstance(turn, Microbatch)]
    assert sum(len(turn.parts) for turn in turns) == 4 * 2 * 2
    assert all(len(turn.parts) <= SETTINGS.train.microbatch_tokens // 4 for turn in turns)
    assert any(len({part.request[0] for part in turn.parts}) > 1 for turn in turns)
    passes = [parts for turn in turns for [*of_rank] in turn.shares for parts in of_rank]
    assert [len({part.request for part in parts}) for parts in passes] == [1] * 8
    opened = [command for turn in turns for command in turn.opens]
    assert len(opened) == 8
    assert sorted(key for turn in turns for key in turn.closes) == sorted((c.model_id, c.seq_id) for c in opened)


class Trickling(queue.SimpleQueue[Any]):
    """An inbox whose messages come one at a time, each to who waits for it, ``apart_s`` after the one before."""

    def __init__(self, apart_s: float) -> None:
        self.coming: list[Any] = []
        self.now, self._apart_s = 10.0, apart_s

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not block or not self.coming:
            return super().get(block, timeout if block else None)
        if timeout is not None and timeout < self._apart_s:
            raise queue.Empty
        self.now += self._apart_s
        return self.coming.pop(0)


@pytest.mark.parametrize(("apart_s", "passes"), [(QUIET_S / 2, [2]), (QUIET_S * 2, [1, 1])], ids=["soon", "later"])
def test_a_rank_at_rest_lets_a_burst_come_in(tiny: Path, apart_s: float, passes: list[int]) -> None:
    """And tells how long each request waited."""
    worker = seen_worker(tiny)
    inbox, waited = Trickling(apart_s), dict[int, float]()

    def respond(response: RankResponse) -> None:
        match response:
            case RankResponse(id=number, result=ForwardBackwardOutput() as output):
                waited[number] = output.metrics["wait_ms:max"]
                if len(waited) == 2:
                    loop.post(RankRequest(id=0, op=Stop()))
            case RankResponse(error=DescantError() as failure):
                raise failure

    loop = TurnLoop(
        worker,
        respond=respond,
        turn_status=TurnStatus(),
        time_share=1.0,
        max_pass_s=math.inf,
        seconds=lambda: inbox.now,
    )
    loop._inbox = inbox
    for model_id in "ab":
        loop.post(RankRequest(id=0, op=CreateModel(model_id=model_id, trainable=Lora(rank=4, seed=0))))
        backward = ForwardBackward(model_id=model_id, seq_id=1, data=(datum([1, 2, 3]),), loss_fn="cross_entropy")
        inbox.coming.append(RankRequest(id=ord(model_id), op=backward))
    loop.run()
    assert [len(turn.opens) for turn in worker.turns if isinstance(turn, Microbatch)] == passes
    assert waited == {ord("a"): pytest.approx(1000 * apart_s if passes == [2] else 0.0), ord("b"): 0.0}


class Clocked(Around):
    """A worker whose turns take as long by its clock as is said here, whatever they take; and the turns."""

    MS = 2.0**-10
    PASS_MS, TOKEN_MS, STEP_MS, ROWS_MS = 2, 1, 3, 5

    def __init__(self, worker: Worker):
        super().__init__(worker)
        self.now = 100.0
        self.turns: list[tuple[str, float]] = []

    def execute(self, op: Operation[Any]) -> Any:
        if isinstance(op, Microbatch):
            self._pass("train", self.PASS_MS + self.TOKEN_MS * DATUM_TOKENS * len(op.parts))
        elif isinstance(op, SampleStep):
            self._pass("sample", self.STEP_MS)
        elif isinstance(op, Rows):
            self._pass("rows", self.ROWS_MS)
        return super().execute(op)

    def _pass(self, kind: str, milliseconds: int) -> None:
        self.now += milliseconds * self.MS
        self.turns.append((kind, milliseconds))


DATUM_TOKENS = 2


@pytest.mark.parametrize(("max_pass_ms", "datums"), [(1000, 8), (10, 4), (1, 1)])
def test_training_and_sampling_share_the_time(tiny: Path, max_pass_ms: int, datums: int) -> None:
    """By the clock, not by turns; a training turn with somebody who samples takes no longer than it may."""
    worker = Clocked(seen_worker(tiny, changed(SETTINGS, train={"microbatch_tokens": 8 * DATUM_TOKENS})))
    stats, turns = dict[str, float](), list[tuple[str, float]]()
    data = (datum([3] * DATUM_TOKENS),)

    def send(seq_id: int) -> None:
        command = ForwardBackward(model_id="a", seq_id=seq_id, data=data, loss_fn="cross_entropy")
        loop.post(RankRequest(id=seq_id, op=command))

    def respond(response: RankResponse) -> None:
        match response:
            case RankResponse(id=9000, error=None, last=True):
                loop.post(RankRequest(id=9001, op=Stats()))
            case RankResponse(id=9001):
                stats.update(response.result)
                turns.extend(worker.turns)
                loop.post(RankRequest(id=0, op=Stop()))
            case RankResponse(id=number, result=ForwardBackwardOutput()):
                send(number + 20)
            case RankResponse(error=DescantError() as failure):
                raise failure

    loop = TurnLoop(
        worker,
        respond=respond,
        turn_status=TurnStatus(),
        time_share=2.0,
        max_pass_s=max_pass_ms * worker.MS,
        seconds=lambda: worker.now,
    )
    loop.post(RankRequest(id=0, op=CreateModel(model_id="a", trainable=Lora(rank=4, seed=0))))
    for seq_id in range(1, 21):
        send(seq_id)
    loop.post(RankRequest(id=9000, op=Sample(request=request(max_tokens=100))))
    loop.run()

    def took_ms(turns: Sequence[tuple[str, float]]) -> dict[str, float]:
        return {kind: sum(ms for of, ms in turns if of == kind) for kind in ("train", "sample", "rows")}

    passes = [number for number, (kind, _) in enumerate(turns) if kind == "train"]
    steps = [number for number, (kind, _) in enumerate(turns) if kind == "sample"]
    assert len(steps) == 100
    assert {turns[number][1] for number in passes[len(passes) // 2 :]} == {worker.PASS_MS + DATUM_TOKENS * datums}
    later = took_ms(turns[passes[4] + 1 : steps[-1]])  # once it is known how long turns are
    assert abs(later["sample"] - 2 * later["train"]) <= 2 * turns[passes[0]][1] + worker.STEP_MS
    assert {kind: stats[f"loop_{kind}_seconds"] / worker.MS for kind in later} == took_ms(turns)
    assert stats["loop_idle_seconds"] == 0


async def test_a_light_tenant_does_not_wait_for_a_heavy_one(rank: tuple[Replica, Seen]) -> None:
    replica, _ = rank
    heavy, light = Model(replica, "heavy"), Model(replica, "light")
    await asyncio.gather(result(heavy.create()), result(light.create()))
    many = [heavy.backward((datum(list(range(1, 15))),) * 4) for _ in range(10)]
    await result(light.backward())
    assert sum(future.done() for future in many) < 5
    await asyncio.gather(*map(result, many))


async def test_a_model_that_arrives_at_an_empty_queue_does_not_catch_up_with_the_past(
    rank: tuple[Replica, Seen],
) -> None:
    """One has trained alone for long, and rests for a moment. Whoever comes then has the same share, not all."""
    replica, seen = rank
    old, new = Model(replica, "old"), Model(replica, "new")
    await asyncio.gather(result(old.create()), result(new.create()))
    data = (datum(list(range(1, 15))),) * 10
    for _ in range(2):
        await result(old.backward(data))
    seen.turns.clear()
    await asyncio.gather(*(result(model.backward(data)) for model in (new, old)))
    order = [part.request[0] for turn in seen.turns for part in turn.parts]
    assert 4 <= order[:10].count("old") <= 6


async def test_tokens_are_sampled_while_training_goes_on(rank: tuple[Replica, Seen]) -> None:
    replica, seen = rank
    model = Model(replica)
    await result(model.create())
    seen.turns.clear()
    many = [model.backward((datum(list(range(1, 15))),) * 4) for _ in range(20)]
    await sampled(replica, request(max_tokens=10))
    assert not all(future.done() for future in many)
    await asyncio.gather(*map(result, many))
    kinds = "".join("m" if hasattr(turn, "parts") else "s" for turn in seen.turns)
    assert "mm" not in kinds[kinds.index("s") : kinds.rindex("s")], kinds


async def test_a_pass_ends_with_its_turn_while_sequences_are_sampled(rank: tuple[Replica, Seen]) -> None:
    replica, seen = rank
    seen.learner.runner.asynchronous = True  # as on CUDA
    model = Model(replica)
    await result(model.create())
    data = (datum(list(range(1, 15))),) * 40
    await result(model.backward(data))
    assert seen.under_way == [(False, True)] * (len(seen.under_way) - 1) + [(False, False)]
    assert len(seen.under_way) > 5
    seen.under_way.clear()
    training = model.backward(data)
    await sampled(replica, request(max_tokens=5))
    assert not training.done()
    await result(training)
    assert (True, False) in seen.under_way
    assert (True, True) not in seen.under_way


class Overlapping(Seen):
    """What a replica on GPUs says of itself, on a CPU whose passes end as they are launched."""

    def __init__(self, worker: Worker):
        super().__init__(worker)
        self.info = replace(worker.info, overlaps=True)


def worker_of(tiny: Path, kind: type[Seen]) -> Seen:
    """A training turn has room for one of ``several``."""
    settings = changed(SETTINGS, train={"microbatch_tokens": 16})
    return kind(build_tiny(RankSpec(model=str(tiny), settings=settings), lambda phase: None, Peers()))


def several(count: int) -> tuple[Datum, ...]:
    """That begin with nothing in common."""
    return tuple(datum([3 + n, *range(1, 14)]) for n in range(count))


def all_answers(worker: Seen, *ops: Any) -> list[Any]:
    """To these in order, which are all there when the loop begins: results, or errors."""
    answers: dict[int, Any] = {}

    def respond(response: RankResponse) -> None:
        if response.last:
            answers[response.id] = response.error or response.result
            if len(answers) == len(ops):
                loop.post(RankRequest(id=0, op=Stop()))

    loop = TurnLoop(worker, respond=respond, turn_status=TurnStatus(), time_share=1.0, max_pass_s=math.inf)
    for number, op in enumerate(ops, 1):
        loop.post(RankRequest(id=number, op=op))
    loop.run()
    return [answers[number] for number in range(1, len(ops) + 1)]


def beside_sampling(model_id: str, passes: int) -> list[Any]:
    """A model that trains on as many passes while somebody samples; then its loss."""
    backward = ForwardBackward(model_id=model_id, seq_id=1, data=several(passes), loss_fn="cross_entropy")
    return [
        CreateModel(model_id=model_id, trainable=Lora(rank=4, seed=0)),
        Sample(request=request(max_tokens=60)),
        backward,
        OptimStep(model_id=model_id, seq_id=2, adam_params=AdamParams(learning_rate=1e-2)),
        replace(backward, seq_id=3, forward_only=True),
    ]


def test_a_step_is_planned_while_a_pass_runs(tiny: Path) -> None:
    """The pass is launched, a step is sampled, and then the pass's requests are closed: with the same numbers."""
    seen = [worker_of(tiny, kind) for kind in (Seen, Overlapping)]
    expected, found = (all_answers(worker, *beside_sampling("model", 6)) for worker in seen)
    for of in (2, 4):
        assert found[of].metrics["loss:sum"] == expected[of].metrics["loss:sum"]
        for mine, other in zip(found[of].loss_fn_outputs, expected[of].loss_fn_outputs, strict=True):
            assert all(np.array_equal(mine[name], other[name]) for name in other)
    assert found[4].metrics["loss:sum"] < found[2].metrics["loss:sum"]
    turns = [op for op in seen[1].turns if isinstance(op, Microbatch | SampleStep)]
    begun = [number for number, op in enumerate(turns) if isinstance(op, Microbatch) and op.parts]
    assert len(begun) >= 6 + 1
    for number in begun[:6]:
        begins, step, ends = turns[number : number + 3]
        assert isinstance(step, SampleStep)
        assert (begins.closes, begins.sampling) == ((), False)
        assert (ends.opens, ends.parts, ends.sampling) == ((), (), True)
    closed = [key for op in turns if isinstance(op, Microbatch) for key in op.closes]
    assert closed == [("model", 1), ("model", 3)]


@pytest.mark.parametrize("which", [1, 2, 3, 4], ids=["begins", "ends", "begins again", "ends again"])
def test_a_pass_beside_a_step_that_breaks_fails_what_was_in_it_and_no_more(tiny: Path, which: int) -> None:
    worker = worker_of(tiny, Overlapping)
    worker.sabotage = {Microbatch: which}
    made, sample, broken, step, loss = all_answers(worker, *beside_sampling("model", 3))
    assert "RuntimeError" in str(broken)
    assert isinstance(step, UserError)  # its gradient is gone
    assert not isinstance(made, DescantError)
    assert not isinstance(sample, DescantError)
    untrained = all_answers(worker_of(tiny, Seen), *beside_sampling("model", 3))[2]
    assert loss.metrics["loss:sum"] == pytest.approx(untrained.metrics["loss:sum"], rel=1e-6)


async def test_its_numbers_are_told_between_turns(rank: tuple[Replica, Seen]) -> None:
    replica, _ = rank
    model = Model(replica)
    await result(model.create())
    before = await replica.stats()
    asked = request(max_tokens=5)
    await sampled(replica, asked)
    after = await replica.stats()
    assert after["sample_prefilled_tokens"] - before["sample_prefilled_tokens"] == 3
    assert after["sample_running"] == after["sample_waiting"] == 0
    assert after["adapters"] == 1


async def test_it_tells_what_its_last_turns_took(rank: tuple[Replica, Seen]) -> None:
    replica, seen = rank
    model = Model(replica)
    await result(model.create())
    await result(model.backward((datum([1, 2, 3, 4]),)))
    await sampled(replica, request(max_tokens=5))
    report = await replica.turns()
    assert report is not None
    stats = await replica.stats()
    counts = {kind: stats[f"{kind}_turn_seconds_count"] for kind in ("rows", "train", "sample")}
    assert counts == {"rows": 1, "train": 1, "sample": sum(isinstance(turn, SampleStep) for turn in seen.turns)}
    assert report.num_turns == sum(counts.values())
    assert report.num_gaps == counts["sample"] - 1
    [train] = [turn for turn in report.slowest if turn.kind == "train"]
    assert (train.sequences, train.tokens) == (1, 4)
    assert train.phases["run"] > 0
    await replica.close()
    assert await replica.turns() is None


async def test_a_pass_has_room_for_what_its_datums_do_not_share(tiny: Path) -> None:
    """Of a budget of 40: 30, with no room for 21; then 21 and three times 2 (an eighth), with no room for 16."""
    made: list[Seen] = []
    settings = changed(SETTINGS, train={"microbatch_tokens": 40})

    def build(phase: Any) -> Seen:
        made.append(seen_worker(tiny, settings))
        return made[0]

    replica = await Replica.in_process(build, settings)
    model = Model(replica)
    await result(model.create())
    made[0].turns.clear()
    prompt = list(range(1, 11)) * 2
    samples = (datum([5] * 30), *(datum([*prompt, i]) for i in range(4)), datum([9] * 16))
    output = cast(ForwardBackwardOutput, await result(model.backward(samples)))
    await replica.close()
    assert [[part.datum for part in turn.parts] for turn in made[0].turns] == [[0], [1, 2, 3, 4], [5]]
    metrics = output.metrics
    assert (metrics["tokens:sum"], metrics["tokens_computed:sum"]) == (30 + 4 * 21 + 16, 30 + 20 + 4 + 16)
    assert metrics["microbatches:sum"] == 3
    assert metrics["adapters_in_pass:max"] == 1
    assert metrics["compute_ms:sum"] > 0
    assert metrics["wait_ms:max"] >= 0


@pytest.mark.parametrize("which", [1, 2], ids=["as it is opened", "when half of it has run"])
async def test_a_pass_that_breaks_fails_what_was_in_it_and_no_more(rank: tuple[Replica, Seen], which: int) -> None:
    replica, seen = rank
    model, other = Model(replica, "model"), Model(replica, "other")
    await asyncio.gather(result(model.create()), result(other.create()))
    before = await model.loss()
    seen.sabotage = {Microbatch: which}
    broken, step = model.backward((datum(list(range(1, 15))),) * 3), model.step()
    failure = await error(broken, ServerError)
    assert "RuntimeError" in str(failure)
    assert "secret" not in str(failure)
    await error(step, UserError)  # its gradient is gone
    assert await model.loss() == before
    await other.train(1)
    await model.train(2)
    assert await model.loss() < before
    assert replica.alive


async def test_a_row_turn_that_breaks_fails_its_commands(rank: tuple[Replica, Seen]) -> None:
    replica, seen = rank
    model = Model(replica)
    seen.sabotage = {Rows: 1}
    await error(model.create(), ServerError)
    await result(model.create())
    await model.train(1)


async def test_a_step_that_breaks_fails_its_requests(rank: tuple[Replica, Seen]) -> None:
    replica, seen = rank
    seen.sabotage = {SampleStep: 1}
    with pytest.raises(ServerError, match="RuntimeError"):
        await sampled(replica, request())
    assert len((await sampled(replica, request())).tokens()) == 4


async def test_training_goes_on_while_a_save_is_written(rank: tuple[Replica, Seen], tmp_path: Path) -> None:
    """The process that writes stands still; passes and steps run; the save then holds what was true at its place in the
    order."""
    replica, seen = rank
    writer = cast(Worker, seen.inner).writer
    writer.start()
    assert writer.pid is not None
    model = Model(replica)
    await result(model.create())
    await model.train(2)
    at_snapshot = await model.loss()
    ref = cast(SnapshotRef, await result(model.snapshot()))
    os.kill(writer.pid, signal.SIGSTOP)
    try:
        save = asyncio.ensure_future(saved(replica, ref, tmp_path / "a"))
        await model.train(2)
        assert not save.done()
    finally:
        os.kill(writer.pid, signal.SIGCONT)
    again = Model(replica, "again")
    await result(again.create(source=await save))
    assert await again.loss() == at_snapshot


async def test_a_checkpoint_is_read_while_others_train(rank: tuple[Replica, Seen], tmp_path: Path) -> None:
    replica, seen = rank
    model = Model(replica)
    await result(model.create())
    await model.train(1)
    source = await saved(replica, cast(SnapshotRef, await result(model.snapshot())), tmp_path / "a")
    held, read = threading.Event(), seen.reads
    seen.reads = lambda source: held.wait(60) and read(source)
    again = Model(replica, "again")
    created, loss = again.create(source=source), again.forward()
    await model.train(1)
    assert not created.done()
    held.set()
    await result(created)
    assert cast(ForwardBackwardOutput, await result(loss)).metrics["loss:sum"] > 0


async def test_a_tenant_with_a_wild_learning_rate_poisons_nobody(rank: tuple[Replica, Seen]) -> None:
    replica, _ = rank
    alone, wild, beside = (Model(replica, name) for name in ("alone", "wild", "beside"))
    await result(alone.create())
    await alone.train(3)
    await asyncio.gather(result(wild.create()), result(beside.create()))
    futures = []
    for _ in range(3):
        futures += [wild.backward(), wild.step(AdamParams(learning_rate=1e30))]
        futures += [beside.backward(), beside.step()]
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    assert not any(isinstance(outcome, RankDied | ServerError) for outcome in outcomes)
    assert close(await alone.loss(), await beside.loss())


@pytest.mark.parametrize("breaks", [False, True])
async def test_requests_move_to_newer_weights_together(rank: tuple[Replica, Seen], breaks: bool) -> None:
    replica, seen = rank
    model = Model(replica)
    await result(model.create())
    old, new = await frozen(model, for_disk=False), await frozen(model, for_disk=False)
    await replica.publish(old)
    seen.turns.clear()
    begun = []

    async def watch(name: str) -> Version | None:
        version = None
        async for delta in replica.sample(request(old.version, max_tokens=100, stream=True, inflight=True)):
            version = delta.version
            if name not in begun:
                begun.append(name)
                if len(begun) == 3:
                    seen.sabotage[Pin] = int(breaks)
                    await replica.publish(new)
        return version

    ended_with = await asyncio.gather(*map(watch, "abc"))
    assert ended_with == [old.version if breaks else new.version] * 3
    pins = [(turn.version, turn.count) for turn in seen.turns if isinstance(turn, Pin)]
    assert pins == [(old.version, 1)] * 3 + [(new.version, 3)]
    assert (await replica.stats())["versions_pinned"] == 0


@pytest.mark.parametrize(
    ("follows", "to_publish", "steps"),
    [(True, True, 0), (True, False, 2), (False, True, None)],
    ids=["with the snapshot", "asked for later", "a snapshot's request"],
)
def test_weights_that_are_followed_are_in_the_next_step(
    tiny: Path, follows: bool, to_publish: bool, steps: int | None
) -> None:
    """Optimiser step and snapshot are one turn; whoever wants them published asks two steps later, and is answered.
    ``steps``: of the old weights after that turn, None: all."""
    worker = seen_worker(tiny)
    refs, versions, answered = list[SnapshotRef](), list[tuple[int, Version | None]](), list[int]()

    def num_steps() -> int:
        return sum(isinstance(turn, SampleStep) for turn in worker.turns)

    def send(*commands: Command) -> None:
        for command in commands:
            loop.post(RankRequest(id=command.seq_id, op=command))

    def snapshot(seq_id: int) -> Snapshot:
        return Snapshot(model_id="a", seq_id=seq_id, kind="sampler", for_disk=False, to_publish=to_publish)

    def respond(response: RankResponse) -> None:
        match response:
            case RankResponse(id=1, result=SnapshotRef() as ref):
                refs.append(ref)
                loop.post(RankRequest(id=8, op=Publish(ref=ref)))
                loop.post(
                    RankRequest(
                        id=100,
                        op=Sample(request=request(ref.version, max_tokens=10, stream=True, inflight=follows)),
                    )
                )
            case RankResponse(id=3, result=SnapshotRef() as ref):
                assert sum(isinstance(turn, Rows) for turn in worker.turns) == 2
                refs.append(ref)
            case RankResponse(id=8 | 9 as number, error=None):
                answered.append(number)
            case RankResponse(id=100, result=SampleDelta() as delta):
                versions.append((num_steps(), delta.version))
                if num_steps() == 2:
                    send(OptimStep(model_id="a", seq_id=2, adam_params=AdamParams()), snapshot(3))
                if num_steps() == 4:
                    loop.post(RankRequest(id=9, op=Publish(ref=refs[1])))
            case RankResponse(id=100, error=None):
                loop.post(RankRequest(id=0, op=Stop()))
            case RankResponse(error=DescantError() as failure):
                raise failure

    loop = TurnLoop(worker, respond=respond, turn_status=TurnStatus(), time_share=1.0, max_pass_s=math.inf)
    send(CreateModel(model_id="a", trainable=Lora(rank=4, seed=0)), snapshot(1))
    loop.run()
    old, new = (ref.version for ref in refs)
    crossed = 10 if steps is None else 2 + steps
    assert versions == [(step, old if step <= crossed else new) for step in range(1, 11)]
    assert answered == [8, 9]
    assert worker.stats()["versions_pinned"] == 0


@pytest.mark.parametrize("what", [Publish, Pin])
def test_weights_that_cannot_be_published_with_their_snapshot_are_published_when_asked_for(
    tiny: Path, what: type[Operation[Any]]
) -> None:
    worker = seen_worker(tiny)
    versions, answered = list[Version | None](), list[int]()

    def respond(response: RankResponse) -> None:
        match response:
            case RankResponse(id=1, result=SnapshotRef() as ref):
                loop.post(RankRequest(id=8, op=Publish(ref=ref)))
                loop.post(
                    RankRequest(
                        id=100, op=Sample(request=request(ref.version, max_tokens=10, stream=True, inflight=True))
                    )
                )
            case RankResponse(id=2, result=SnapshotRef() as ref):
                loop.post(RankRequest(id=9, op=Publish(ref=ref)))
            case RankResponse(id=8 | 9 as number, error=None):
                answered.append(number)
            case RankResponse(id=100, result=SampleDelta() as delta):
                versions.append(delta.version)
                if len(versions) == 2:
                    worker.sabotage[what] = 1
                    loop.post(RankRequest(id=2, op=snapshot(2)))
            case RankResponse(id=100, error=None):
                loop.post(RankRequest(id=0, op=Stop()))
            case RankResponse(error=DescantError() as failure):
                raise failure

    def snapshot(seq_id: int) -> Snapshot:
        return Snapshot(model_id="a", seq_id=seq_id, kind="sampler", for_disk=False, to_publish=True)

    loop = TurnLoop(worker, respond=respond, turn_status=TurnStatus(), time_share=1.0, max_pass_s=math.inf)
    loop.post(RankRequest(id=0, op=CreateModel(model_id="a", trainable=Lora(rank=4, seed=0))))
    loop.post(RankRequest(id=1, op=snapshot(1)))
    loop.run()
    assert answered == [8, 9]
    assert [version.number for version in versions if version is not None] == [1] * 2 + [2] * 8


async def test_many_versions_are_served_each_with_its_own_weights(rank: tuple[Replica, Seen]) -> None:
    replica, _ = rank
    model = Model(replica)
    await result(model.create())
    expected = {}
    for _ in range(4):
        await model.train(1, OTHER_DATA)
        ref = await frozen(model, for_disk=False)
        await replica.publish(ref)
        expected[ref.version] = (await sampled(replica, request(ref.version, prompt_logprobs=True))).prompt_logprobs
    together = await asyncio.gather(
        *(sampled(replica, request(version, prompt_logprobs=True, max_tokens=8)) for version in expected)
    )
    for got, scores in zip(together, expected.values()):
        assert near(got.prompt_logprobs, scores)
    assert len({round(scores[1], 4) for scores in expected.values()}) == 4
