"""A rank's queues choose what the plain reference chooses, which looks at all that waits; and kinds of work share
the turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descant.ranks.decide import IDLE, ROWS, SAMPLE, TRAIN, Choice, Kind, Shares
from descant.ranks.queues import Entry, Queues
from descant.testing import reference_queues
from descant.testing.reference_queues import ReferenceQueues
from descant.testing.trainer import datum
from descant.train.pack import MIN_SHARED_TOKENS
from descant.train.runner import RequestKey
from descant.types import (
    AdamParams,
    CheckpointSource,
    Command,
    CreateModel,
    Datum,
    DeleteModel,
    ForwardBackward,
    LoadState,
    Lora,
    OptimStep,
)

TURN_TOKENS = 100
PREFIX = [9] * (MIN_SHARED_TOKENS + 4)
SOURCE = CheckpointSource(uri="a checkpoint", directory="/a", optimizer=False)


@dataclass
class Bank:
    """``AdapterMemory``, and what was asked of it."""

    adapter_bytes: int = 10**9
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    offloaded: set[str] = field(default_factory=set)
    asked: int = 0

    def bytes_in_use(self, model_id: str) -> tuple[int, int]:
        self.asked += 1
        return self.sizes.get(model_id, (1, 1))

    def is_resident(self, model_id: str) -> bool:
        self.asked += 1
        return model_id not in self.offloaded


def queues(bank: Bank, *, tokens: int = TURN_TOKENS) -> Queues:
    return Queues(
        bank,
        num_ranks=1,
        microbatch_tokens=tokens,
        piece_tokens=None,
        packable=True,
        shares={SAMPLE: 1.0, "draft": 0.5},
    )


def backward(model_id: str, seq_id: int, *lengths: int) -> Entry:
    data = tuple(datum([7] * length) for length in lengths)
    command = ForwardBackward(model_id=model_id, seq_id=seq_id, data=data, loss_fn="cross_entropy")
    return Entry(id=0, command=command, arrived_s=0.0)


def step(model_id: str, seq_id: int) -> Entry:
    return Entry(id=0, command=OptimStep(model_id=model_id, seq_id=seq_id, adam_params=AdamParams()), arrived_s=0.0)


def run(waiting: Queues, *ready: Kind) -> Choice:
    """A turn."""
    choice = waiting.choose(ready)
    ended: Collection[RequestKey] = waiting.take(choice, 0.0).closes if choice.kind == TRAIN else choice.keys
    for key in ended:
        waiting.end(key)
    waiting.ran(choice.kind)
    return choice


# ------------------------------------------------------------------------------------------ held to the plain reference


class Both:
    """The queues and the plain ones, and what happens to both."""

    def __init__(self, random: Random, *, num_ranks: int, piece_tokens: int | None, packable: bool, share: float):
        self.random, self.bank = random, Bank()
        self.sides = [
            made(
                self.bank,
                num_ranks=num_ranks,
                microbatch_tokens=TURN_TOKENS,
                piece_tokens=piece_tokens,
                packable=packable,
                shares={SAMPLE: share},
            )
            for made in (Queues, ReferenceQueues)
        ]
        self.queues, self.plain = self.sides
        self.commands = dict[RequestKey, Command]()
        self.moved = False
        """Adapters, since a turn about models."""
        self.reading = list[tuple[RequestKey, Future[None]]]()

    def arrive(self, model_id: str) -> None:
        command = self._command(model_id, len(self.commands))
        key, reading = (model_id, command.seq_id), None
        if isinstance(command, CreateModel | LoadState) and command.source is not None:
            reading = Future[None]()
            self.reading.append((key, reading))
        self.commands[key] = command
        for side in self.sides:
            side.add(Entry(id=0, command=command, arrived_s=0.0, reading=reading))

    def _command(self, model_id: str, seq_id: int) -> Command:
        match self.random.randrange(10):
            case 0:
                return OptimStep(model_id=model_id, seq_id=seq_id, adam_params=AdamParams())
            case 1:
                return DeleteModel(model_id=model_id, seq_id=seq_id)
            case 2:
                return LoadState(model_id=model_id, seq_id=seq_id, source=SOURCE)
            case 3:
                source = self.random.choice([None, SOURCE])
                return CreateModel(model_id=model_id, seq_id=seq_id, trainable=Lora(), source=source)
            case _:
                return ForwardBackward(model_id=model_id, seq_id=seq_id, data=self._data(), loss_fn="cross_entropy")

    def _data(self) -> tuple[Datum, ...]:
        prefix, longest = self.random.choice([[], PREFIX]), self.random.choice([3, 30, 60, 250])
        lengths = [self.random.randint(1, longest) for _ in range(self.random.randrange(7))]
        return tuple(datum([*prefix, *([7] * length)]) for length in lengths)

    def read(self) -> None:
        if self.reading:
            (model_id, _), reading = self.reading.pop(self.random.randrange(len(self.reading)))
            reading.set_result(None)
            self.queues.read(model_id)

    def turn(self) -> None:
        ready = {SAMPLE} if self.random.random() < 0.4 else set()
        choice, expected = (side.choose(ready) for side in self.sides)
        assert choice == expected
        if choice.kind == IDLE:
            return
        self._look_at_line(choice)
        ended: Collection[RequestKey] = choice.keys
        if choice.kind == TRAIN:
            taken, other = (side.take(choice, 1.0) for side in self.sides)
            assert taken.entries.keys() == other.entries.keys()
            for name in ("opens", "closes", "tokens", "backward"):
                assert getattr(taken, name) == getattr(other, name)
            refused = {key for key in taken.entries if self.random.random() < 0.05}
            ended = choice.keys if self.random.random() < 0.1 else {*taken.closes, *refused}
        for model_id, seq_id in sorted(ended):
            self.bank.sizes[model_id] = (self.random.randint(1, 6), self.random.randint(0, 3))
            for side in self.sides:
                assert side.end((model_id, seq_id)).command is self.commands[model_id, seq_id]
        for side in self.sides:
            side.ran(choice.kind)
        self.moved = self.moved and choice.kind == SAMPLE

    def move(self, limit: int, offloaded: set[str]) -> None:
        self.bank.adapter_bytes, self.bank.offloaded = limit, offloaded
        self.moved = True

    def _look_at_line(self, choice: Choice) -> None:
        """In the same order, among the resident and among the offloaded; what is being read comes last."""
        order, expected = self.queues.prefetch_order(choice), self.plain.prefetch_order(choice)
        assert Counter(order) == Counter(expected)
        if self.moved and choice.kind == SAMPLE:
            return
        blocked = [model.model_id for model in self.plain.seen if not model.rows and not model.data]
        able = [model_id for model_id in order if model_id not in blocked]
        assert [*order[len(able) :]] == [model_id for model_id in order if model_id in blocked]
        for offloaded in (False, True):
            assert [m for m in able if (m in self.bank.offloaded) == offloaded] == [
                m for m in expected if (m in self.bank.offloaded) == offloaded and m not in blocked
            ]


@given(
    seed=st.integers(0, 2**32),
    num_models=st.integers(1, 7),
    num_ranks=st.sampled_from([1, 1, 2]),
    piece_tokens=st.sampled_from([None, None, 40]),
    packable=st.sampled_from([True, True, True, False]),
    share=st.sampled_from([0.3, 1.0, 2.5, 4.0]),
    arrivals=st.integers(1, 5),
)
def test_they_choose_what_looking_at_all_would(
    seed: int,
    num_models: int,
    num_ranks: int,
    piece_tokens: int | None,
    packable: bool,
    share: float,
    arrivals: int,
) -> None:
    random = Random(seed)
    both = Both(random, num_ranks=num_ranks, piece_tokens=piece_tokens, packable=packable, share=share)
    names = [f"m{number}" for number in range(num_models)]
    for _ in range(60):
        for _ in range(random.randrange(arrivals)):
            both.arrive(random.choice(names))
        if random.random() < 0.3:
            both.read()
        if random.random() < 0.3:
            both.move(random.choice([3, 6, 12, 10**9]), {name for name in names if random.random() < 0.6})
        both.turn()


def test_the_order_in_which_adapters_are_asked_for() -> None:
    """Row commands, passes by their order, then whose adapters are out; then what is read."""
    bank = Bank(offloaded={"a", "e"})
    waiting = queues(bank, tokens=7)
    reading = Future[None]()
    waiting.add(Entry(id=0, command=LoadState(model_id="f", seq_id=1, source=SOURCE), arrived_s=0.0, reading=reading))
    waiting.add(backward("b", 1, 7))
    waiting.add(backward("e", 1, 1))
    assert run(waiting).model_ids == {"b"}
    for entry in (backward("a", 1, 1), backward("b", 2, 1), backward("c", 1, 1), step("d", 1), backward("d", 2, 1)):
        waiting.add(entry)
    rows = waiting.choose(())
    assert rows.model_ids == {"d"}
    assert waiting.prefetch_order(rows) == ("e", "c", "d", "b", "a", "f")
    assert waiting.prefetch_order(Choice(kind=SAMPLE)) == ("d", "e", "c", "b", "a", "f")
    reading.set_result(None)
    waiting.read("f")
    assert waiting.choose(()).model_ids == {"d", "f"}


def test_a_newcomer_does_not_shut_the_others_out() -> None:
    waiting = queues(Bank(), tokens=10)
    for number in range(20):
        waiting.add(backward("old", number, 10))
        run(waiting)
    for number in range(20, 30):
        waiting.add(backward("old", number, 10))
        waiting.add(backward("new", number, 10))
    assert Counter(m for _ in range(10) for m in run(waiting).model_ids) == {"old": 5, "new": 5}


@pytest.mark.parametrize("what", ["data", "rows", "reading"])
def test_a_decode_step_looks_at_nothing_that_waits(what: str) -> None:
    bank = Bank()
    waiting = queues(bank)
    waiting.add(step("first", 1))
    run(waiting)
    for number in range(50):
        name = f"m{number}"
        entry = {"data": backward(name, 1, 30), "rows": step(name, 1), "reading": step(name, 1)}[what]
        entry.reading = Future() if what == "reading" else None
        waiting.add(entry)
    if what == "data":
        assert run(waiting, SAMPLE).kind == SAMPLE
        assert run(waiting).kind == TRAIN
    bank.asked = 0
    choice = waiting.choose({SAMPLE})
    assert choice == Choice(kind=SAMPLE)
    assert len(waiting.prefetch_order(choice)) in (47, 50)
    assert bank.asked == 0


def test_a_training_turn_asks_about_those_it_takes() -> None:
    bank = Bank()
    waiting = queues(bank)
    for number in range(500):
        waiting.add(backward(f"m{number}", 1, 30))
    for _ in range(3):
        bank.asked = 0
        assert len(waiting.choose(()).data) == 3
        assert bank.asked <= 3 * 2 + 2
        run(waiting)


# --------------------------------------------------------------------------------------------------------------- shares


@given(
    share=st.sampled_from([0.0, 0.3, 0.5, 1.0, 2.5, 4.0]),
    ready=st.lists(st.sets(st.sampled_from([TRAIN, SAMPLE, ROWS])), max_size=80),
)
def test_training_and_sampling_take_turns_as_by_one_credit(share: float, ready: list[set[Kind]]) -> None:
    shares, credit, last = Shares({SAMPLE: share}), 1.0, IDLE
    for kinds in ready:
        models = (
            reference_queues.ModelView(model_id="a", rows=(step("a", 1).command,) if ROWS in kinds else ()),
            reference_queues.ModelView(model_id="b", data=backward("b", 1, 1).data(1, None) if TRAIN in kinds else ()),
        )
        state = reference_queues.Waiting(models=models, sampling=SAMPLE in kinds, last=last, sample_credit=credit)
        kind = reference_queues.decide(state, microbatch_tokens=1).kind
        assert shares.next(kinds) == kind
        if kind != IDLE:
            shares.ran(kind)
            last, credit = kind, reference_queues.credit_after(credit, kind, steps_per_microbatch=share)


def turns(shares: Shares, *ready: Kind, count: int = 700) -> list[Kind]:
    ran = []
    for _ in range(count):
        ran.append(shares.next(ready))
        shares.ran(ran[-1])
    return ran


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        ([TRAIN, SAMPLE, "draft"], {TRAIN: 200, SAMPLE: 400, "draft": 100}),
        ([TRAIN, "draft"], {TRAIN: 467, "draft": 233}),
        ([SAMPLE, "draft"], {SAMPLE: 560, "draft": 140}),
        (["draft"], {"draft": 700}),
        ([ROWS, SAMPLE, "draft"], {ROWS: 350, SAMPLE: 280, "draft": 70}),
    ],
)
def test_a_third_kind_has_its_share(ready: list[Kind], expected: dict[Kind, int]) -> None:
    ran = Counter(turns(Shares({SAMPLE: 2.0, "draft": 0.5}), *ready))
    assert ran.keys() == expected.keys()
    assert all(abs(ran[kind] - count) <= 3 for kind, count in expected.items()), ran


def test_a_third_kind_makes_a_token_wait_for_no_more_than_a_turn_of_each() -> None:
    ran = turns(Shares({SAMPLE: 1.0, "draft": 1.0}), TRAIN, SAMPLE, "draft")
    at = [place for place, kind in enumerate(ran) if kind == SAMPLE]
    assert max(b - a for a, b in pairwise(at)) == 3


def test_what_was_idle_has_not_saved_up() -> None:
    shares = Shares({SAMPLE: 2.0, "draft": 0.5})
    turns(shares, TRAIN)
    assert Counter(turns(shares, TRAIN, SAMPLE, "draft", count=4)) == {SAMPLE: 2, "draft": 1, TRAIN: 1}
    turns(shares, SAMPLE, "draft")
    assert TRAIN in turns(shares, TRAIN, SAMPLE, "draft", count=4)


def test_a_turn_of_another_kind_leaves_the_queues_as_they_are() -> None:
    waiting = queues(Bank(), tokens=10)
    waiting.add(backward("a", 1, 10, 10))
    kinds = [run(waiting, "draft").kind for _ in range(4)]
    assert kinds == ["draft", TRAIN, TRAIN, "draft"]
