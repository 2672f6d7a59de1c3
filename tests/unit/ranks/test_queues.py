"""A rank's queues choose what the plain reference chooses, which looks at all that waits; and kinds of work share
the turns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descant.ranks.decide import IDLE, LAG_TURNS, ROWS, SAMPLE, TRAIN, Choice, Kind, PassTokens, Shares
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
MS = 2.0**-10
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


def queues(
    bank: Bank, *, tokens: int = TURN_TOKENS, max_pass_s: float = math.inf, piece_tokens: int | None = None
) -> Queues:
    return Queues(
        bank,
        num_ranks=1,
        microbatch_tokens=tokens,
        piece_tokens=piece_tokens,
        packable=True,
        shares={TRAIN: 1.0, SAMPLE: 1.0, "draft": 0.5},
        max_pass_s=max_pass_s,
    )


def backward(model_id: str, seq_id: int, *lengths: int) -> Entry:
    data = tuple(datum([7] * length) for length in lengths)
    command = ForwardBackward(model_id=model_id, seq_id=seq_id, data=data, loss_fn="cross_entropy")
    return Entry(id=0, command=command, arrived_s=0.0)


def step(model_id: str, seq_id: int) -> Entry:
    return Entry(id=0, command=OptimStep(model_id=model_id, seq_id=seq_id, adam_params=AdamParams()), arrived_s=0.0)


def run(waiting: Queues, *ready: Kind) -> Choice:
    """A turn of a second."""
    choice = waiting.choose(dict.fromkeys(ready, 1))
    ended: Collection[RequestKey] = waiting.take(choice, 0.0).closes if choice.kind == TRAIN else choice.keys
    for key in ended:
        waiting.end(key)
    waiting.ran(choice.kind, 1.0)
    return choice


# ------------------------------------------------------------------------------------------ held to the plain reference


class Both:
    """The queues and the plain ones, and what happens to both."""

    def __init__(
        self,
        random: Random,
        *,
        num_ranks: int,
        piece_tokens: int | None,
        packable: bool,
        share: float,
        max_pass_s: float,
    ):
        self.random, self.bank = random, Bank()
        self.sides = [
            made(
                self.bank,
                num_ranks=num_ranks,
                microbatch_tokens=TURN_TOKENS,
                piece_tokens=piece_tokens,
                packable=packable,
                shares={TRAIN: 1.0, SAMPLE: share},
                max_pass_s=max_pass_s,
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
        ready = {SAMPLE: self.random.choice([1, 2, 4])} if self.random.random() < 0.4 else {}
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
        seconds = self.random.choice([1, 2, 3, 10, 500]) * 2**-10
        for side in self.sides:
            side.ran(choice.kind, seconds)
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
    share=st.sampled_from([0.25, 1.0, 2.0, 4.0]),
    max_pass_s=st.sampled_from([2**-7, math.inf]),
    arrivals=st.integers(1, 5),
)
def test_they_choose_what_looking_at_all_would(
    seed: int,
    num_models: int,
    num_ranks: int,
    piece_tokens: int | None,
    packable: bool,
    share: float,
    max_pass_s: float,
    arrivals: int,
) -> None:
    random = Random(seed)
    both = Both(
        random,
        num_ranks=num_ranks,
        piece_tokens=piece_tokens,
        packable=packable,
        share=share,
        max_pass_s=max_pass_s,
    )
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
    rows = waiting.choose({})
    assert rows.model_ids == {"d"}
    assert waiting.prefetch_order(rows) == ("e", "c", "d", "b", "a", "f")
    assert waiting.prefetch_order(Choice(kind=SAMPLE)) == ("d", "e", "c", "b", "a", "f")
    reading.set_result(None)
    waiting.read("f")
    assert waiting.choose({}).model_ids == {"d", "f"}


def test_a_newcomer_does_not_shut_the_others_out() -> None:
    waiting = queues(Bank(), tokens=10)
    for number in range(20):
        waiting.add(backward("old", number, 10))
        run(waiting)
    for number in range(20, 30):
        waiting.add(backward("old", number, 10))
        waiting.add(backward("new", number, 10))
    assert Counter(m for _ in range(10) for m in run(waiting).model_ids) == {"old": 5, "new": 5}


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Always has a request of ``datums`` waiting; a turn takes ``pass_ms`` for it and ``token_ms`` for each token."""

    datums: tuple[int, ...]
    token_ms: float = 1.0
    pass_ms: float = 0.0
    forward_only: bool = False


def spent(tenants: Mapping[str, Tenant], waiting: Queues, *ready: Kind, turns: int = 2000) -> dict[str, float]:
    """Milliseconds of the device that each has had; every turn takes what its datums take."""
    seq_ids = count()
    had = dict.fromkeys(tenants, 0.0)

    def add(name: str) -> None:
        entry = backward(name, next(seq_ids), *tenants[name].datums)
        assert isinstance(entry.command, ForwardBackward)
        entry.command = replace(entry.command, forward_only=tenants[name].forward_only)
        waiting.add(entry)

    for name in [*tenants, *tenants]:
        add(name)
    for _ in range(turns):
        choice = waiting.choose(dict.fromkeys(ready, 1))
        took = {name: tenants[name].pass_ms for name in choice.model_ids}
        for waits in choice.data:
            name = waits.part.request[0]
            took[name] += tenants[name].token_ms * waits.tokens
        if choice.kind == TRAIN:
            for key in waiting.take(choice, 0.0).closes:
                waiting.end(key)
                add(key[0])
            had = {name: had[name] + took.get(name, 0.0) for name in had}
        waiting.ran(choice.kind, MS * (sum(took.values()) if choice.kind == TRAIN else 1.0))
    return had


ALIKE = Tenant(datums=(10,))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Tenant(datums=(10,)), id="alike"),
        pytest.param(Tenant(datums=(10,), token_ms=2.0), id="tokens that take longer"),
        pytest.param(Tenant(datums=(2,), pass_ms=15.0), id="passes of few tokens"),
        pytest.param(Tenant(datums=(10,), token_ms=0.3, forward_only=True), id="evaluations"),
        pytest.param(Tenant(datums=(10, 10, 10)), id="large requests"),
    ],
)
@pytest.mark.parametrize("piece_tokens", [pytest.param(10, id="cpu"), pytest.param(None, id="beside sampling")])
def test_models_share_the_time_of_training_turns(other: Tenant, piece_tokens: int | None) -> None:
    """Turns of one model each, of which is not known in advance what they take. (Much longer ones have more, since
    nobody is skipped for more than ``STARVATION_BOUND`` passes for each model that waits.)"""
    waiting = queues(Bank(), tokens=10, piece_tokens=piece_tokens)
    had = spent({"other": other, "a": ALIKE, "b": ALIKE}, waiting, *([] if piece_tokens else [SAMPLE]))
    assert had["other"] == pytest.approx(had["a"], rel=0.1)
    assert had["a"] == pytest.approx(had["b"], rel=0.1)


@pytest.mark.parametrize(
    ("other", "times"),
    [(Tenant(datums=(10,), token_ms=5.0), 5.0), (Tenant(datums=(10,), token_ms=0.5, forward_only=True), 1.0)],
    ids=["tokens that take longer", "evaluations"],
)
def test_where_turns_are_not_measured_tokens_count(other: Tenant, times: float) -> None:
    """A GPU's, while nobody samples: they may end before the device has done them."""
    had = spent({"other": other, "a": ALIKE}, queues(Bank(), tokens=10))
    assert had["other"] == pytest.approx(times * had["a"], rel=0.1)


def test_one_turn_that_compiles_counts_as_eight_at_most() -> None:
    waiting = queues(Bank(), tokens=10, piece_tokens=10)
    for number in range(6):
        waiting.add(backward(f"m{number}", 1, *[10] * 90))

    def turn(milliseconds: float) -> str:
        choice = waiting.choose({})
        waiting.take(choice, 0.0)
        waiting.ran(TRAIN, MS * milliseconds)
        [name] = choice.model_ids
        return name

    for _ in range(60):
        turn(10.0)
    name = turn(1000.0)
    assert [turn(10.0) for _ in range(5 * 8)].count(name) in (1, 2, 3), "skipped for the starvation bound"


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
    choice = waiting.choose({SAMPLE: 1})
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
        assert len(waiting.choose({}).data) == 3
        assert bank.asked <= 3 * 2 + 2
        run(waiting)


# --------------------------------------------------------------------------------------------------------------- shares


@given(
    share=st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]),
    turns=st.lists(
        st.tuples(
            st.sets(st.sampled_from([TRAIN, SAMPLE, ROWS])), st.integers(0, 20) | st.sampled_from([0, 300, 10**7])
        ),
        max_size=80,
    ),
)
def test_training_and_sampling_take_turns_as_by_one_lead(share: float, turns: list[tuple[set[Kind], int]]) -> None:
    shares, past = Shares({TRAIN: 1.0, SAMPLE: share}), reference_queues.Past()
    for kinds, milliseconds in turns:
        models = (
            reference_queues.ModelView(model_id="a", rows=(step("a", 1).command,) if ROWS in kinds else ()),
            reference_queues.ModelView(model_id="b", data=backward("b", 1, 1).data(1, None) if TRAIN in kinds else ()),
        )
        state = reference_queues.Waiting(models=models, sampling=SAMPLE in kinds, past=past)
        kind = reference_queues.decide(state, microbatch_tokens=1).kind
        assert shares.next(kinds) == kind
        if kind != IDLE:
            shares.ran(kind, milliseconds * MS)
            both_wait = {TRAIN, SAMPLE} <= kinds
            past = past.after(kind, milliseconds * MS, time_share=share, both_wait=both_wait)


def turns(shares: Shares, *ready: Kind, count: int = 700, takes: Mapping[Kind, float] | None = None) -> list[Kind]:
    """``takes``: seconds of each kind's turn; one that is not there takes one."""
    ran = []
    for _ in range(count):
        ran.append(shares.next(ready))
        shares.ran(ran[-1], (takes or {}).get(ran[-1], 1.0))
    return ran


ALL_KINDS = (TRAIN, SAMPLE, "draft", ROWS)
LONGEST = 40


@given(
    shares=st.fixed_dictionaries({SAMPLE: st.sampled_from([0.25, 1.0, 3.0]), "draft": st.sampled_from([0.5, 1.0])}),
    ready=st.lists(st.sets(st.sampled_from(ALL_KINDS), min_size=1), min_size=1, max_size=12),
    milliseconds=st.lists(st.integers(0, LONGEST), min_size=1, max_size=12),
    trains_always=st.booleans(),
)
def test_nobody_waits_for_longer_than_is_promised(
    shares: dict[Kind, float], ready: list[set[Kind]], milliseconds: list[int], trains_always: bool
) -> None:
    """Whatever is ready when, and whatever turns take."""
    waiting = Shares({TRAIN: 1.0, **shares})
    passes = Counter[Kind]()
    """Training turns since a kind had work or its last turn."""
    others_s, last = dict.fromkeys(shares, 0.0), IDLE
    """Seconds of each since the last training turn."""
    longest = {kind: MS * LONGEST / share for kind, share in shares.items()}
    lag = LAG_TURNS * max(MS * LONGEST, *longest.values())
    for number in range(300):
        kinds = ready[number % len(ready)] | ({TRAIN} if trains_always else set())
        kind, seconds = waiting.next(kinds), MS * milliseconds[number % len(milliseconds)]
        assert kind in kinds
        assert kind == ROWS or ROWS not in kinds or last == ROWS, "rows first"
        assert not (kind == last == ROWS and kinds != {ROWS}), "but not twice in a row"
        waiting.ran(kind, seconds)
        last = kind
        for other, share in shares.items():
            passes[other] = 0 if other not in kinds or kind == other else passes[other] + (kind == TRAIN)
            assert share < 1 or passes[other] <= 1, "one training turn at most"
            others_s[other] = 0.0 if kind == TRAIN else others_s[other] + seconds * (kind == other)
            if trains_always:
                assert others_s[other] <= share * (lag + longest[other]) + MS, "training is never shut out"


@given(
    share=st.sampled_from([0.5, 1.0, 2.5, 4.0]),
    passes=st.lists(st.integers(10, 20), min_size=1, max_size=20),
    steps=st.lists(st.integers(1, 10), min_size=1, max_size=20),
)
def test_over_a_long_run_times_are_as_the_shares(share: float, passes: list[int], steps: list[int]) -> None:
    """Within a turn of each, once it is known what is usual. No step takes longer than a pass, by their shares."""
    shares = Shares({TRAIN: 1.0, SAMPLE: share})
    had, began = {TRAIN: 0.0, SAMPLE: 0.0}, (0.0, 0.0)
    for number in range(600):
        kind = shares.next({TRAIN, SAMPLE})
        takes = passes[number % len(passes)] if kind == TRAIN else steps[number % len(steps)] * share
        shares.ran(kind, MS * takes)
        had[kind] += MS * takes
        if number == 60:
            began = had[TRAIN], had[SAMPLE]
    training, sampling = had[TRAIN] - began[0], had[SAMPLE] - began[1]
    assert abs(training - sampling / share) <= MS * (20 + 10)


@pytest.mark.parametrize(
    ("ready", "takes", "expected"),
    [
        ([TRAIN, SAMPLE, "draft"], {}, {TRAIN: 200, SAMPLE: 400, "draft": 100}),
        ([TRAIN, SAMPLE, "draft"], {TRAIN: 4.0}, {TRAIN: 64, SAMPLE: 509, "draft": 127}),
        ([TRAIN, "draft"], {}, {TRAIN: 467, "draft": 233}),
        ([SAMPLE, "draft"], {}, {SAMPLE: 560, "draft": 140}),
        ([SAMPLE, "draft"], {SAMPLE: 0.5}, {SAMPLE: 622, "draft": 78}),
        (["draft"], {}, {"draft": 700}),
        ([ROWS, SAMPLE, "draft"], {ROWS: 50.0}, {ROWS: 350, SAMPLE: 280, "draft": 70}),
    ],
)
def test_a_third_kind_has_its_share(ready: list[Kind], takes: dict[Kind, float], expected: dict[Kind, int]) -> None:
    shares = Shares({TRAIN: 1.0, SAMPLE: 2.0, "draft": 0.5})
    turns(shares, *ready, takes=takes, count=50)  # learns what is usual
    ran = Counter(turns(shares, *ready, takes=takes))
    assert ran.keys() == expected.keys()
    assert all(abs(ran[kind] - count) <= 5 for kind, count in expected.items()), ran


def test_a_third_kind_makes_a_token_wait_for_no_more_than_a_turn_of_each() -> None:
    ran = turns(Shares({TRAIN: 1.0, SAMPLE: 1.0, "draft": 1.0}), TRAIN, SAMPLE, "draft")
    at = [place for place, kind in enumerate(ran) if kind == SAMPLE]
    assert max(b - a for a, b in pairwise(at)) == 3


def test_what_was_idle_has_not_saved_up() -> None:
    shares = Shares({TRAIN: 1.0, SAMPLE: 2.0, "draft": 0.5})
    turns(shares, TRAIN)
    assert Counter(turns(shares, TRAIN, SAMPLE, "draft", count=7)) == {SAMPLE: 4, "draft": 1, TRAIN: 2}
    turns(shares, SAMPLE, "draft")
    assert TRAIN in turns(shares, TRAIN, SAMPLE, "draft", count=4)


def test_nobody_pays_for_what_it_had_alone() -> None:
    shares = Shares({TRAIN: 1.0, SAMPLE: 1.0})
    turns(shares, TRAIN, SAMPLE, count=50)
    turns(shares, TRAIN)
    turns(shares, SAMPLE, count=3)
    assert Counter(turns(shares, TRAIN, SAMPLE, count=10)) == {TRAIN: 5, SAMPLE: 5}


def test_one_turn_that_is_long_shuts_nobody_out() -> None:
    shares = Shares({TRAIN: 1.0, SAMPLE: 1.0})
    turns(shares, TRAIN, SAMPLE, takes={TRAIN: 8 * MS, SAMPLE: MS})
    while shares.next({TRAIN, SAMPLE}) != TRAIN:
        shares.ran(SAMPLE, MS)
    shares.ran(TRAIN, 10_000 * MS)
    steps = turns(shares, TRAIN, SAMPLE, count=200, takes={SAMPLE: MS}).index(TRAIN)
    assert 8 <= steps <= 2 * LAG_TURNS * 8, "usual turns are twice as long after it, at most"


def test_what_long_steps_took_from_training_is_given_back_for_a_while_only() -> None:
    """They are longer than passes, of which never two are in a row."""
    shares = Shares({TRAIN: 1.0, SAMPLE: 1.0})
    ran = turns(shares, TRAIN, SAMPLE, takes={TRAIN: MS, SAMPLE: 20 * MS})
    assert (TRAIN, TRAIN) not in pairwise(ran)
    ran = turns(shares, TRAIN, SAMPLE, count=60, takes={TRAIN: 10 * MS, SAMPLE: MS})
    assert (SAMPLE, SAMPLE) not in pairwise(ran[:20])
    assert (SAMPLE, SAMPLE) in pairwise(ran)


def test_a_tenant_alone_who_trains_step_by_step_has_its_share_and_no_more() -> None:
    """Between two of its passes its next request is on the way for one step."""
    shares, took = Shares({TRAIN: 1.0, SAMPLE: 1.0}), {TRAIN: 6 * MS, SAMPLE: MS}
    had = Counter[Kind]()
    kind = TRAIN
    for _ in range(600):
        kind = shares.next({SAMPLE} if kind == TRAIN else {TRAIN, SAMPLE})
        shares.ran(kind, took[kind])
        had[kind] += int(took[kind] / MS)
    assert had[TRAIN] == pytest.approx(had[SAMPLE], rel=0.2)


@pytest.mark.parametrize(("trained", "sampled", "expected"), [(4, 1, 4.0), (6, 3, 2.0), (4, 4, 1.0), (1, 8, 1.0)])
def test_where_more_models_wait_to_be_trained_they_have_more_of_the_time(
    trained: int, sampled: int, expected: float
) -> None:
    waiting = queues(Bank(), tokens=10)
    for number in range(trained):
        waiting.add(backward(f"m{number}", 1, *[10] * 400))
    spent = dict.fromkeys((TRAIN, SAMPLE), 0.0)
    for _ in range(2000):
        choice = waiting.choose({SAMPLE: sampled})
        if choice.kind == TRAIN:
            waiting.take(choice, 0.0)
        seconds = 1.0 if choice.kind == TRAIN else 0.125
        waiting.ran(choice.kind, seconds)
        spent[choice.kind] += seconds
    assert spent[TRAIN] / spent[SAMPLE] == pytest.approx(expected, rel=0.1)


def test_a_turn_of_another_kind_leaves_the_queues_as_they_are() -> None:
    waiting = queues(Bank(), tokens=10)
    waiting.add(backward("a", 1, 10, 10))
    kinds = [run(waiting, "draft").kind for _ in range(4)]
    assert kinds == ["draft", TRAIN, "draft", TRAIN]


# ----------------------------------------------------------------------------------------------------- tokens of a pass


def test_a_pass_that_others_wait_for_takes_no_longer_than_it_may() -> None:
    """Of 8 datums at 2 tokens a second, 50 tokens fit 25 s; alone it is as large as it can be."""
    waiting = queues(Bank(), tokens=80, max_pass_s=25.0)

    def passes(*ready: Kind, tokens_per_s: float, forward_only: bool = False) -> int:
        """The datums of a training turn."""
        entry = backward("a", 1, *[10] * 8)
        assert isinstance(entry.command, ForwardBackward)
        entry.command = replace(entry.command, forward_only=forward_only)
        waiting.add(entry)
        while (choice := waiting.choose(dict.fromkeys(ready, 1))).kind != TRAIN:
            waiting.ran(choice.kind, 1.0)
        waiting.take(choice, 0.0)
        waiting.end(entry.key)
        waiting.ran(TRAIN, 10 * len(choice.data) / tokens_per_s)
        return len(choice.data)

    assert passes(tokens_per_s=100.0) == 8
    assert passes(SAMPLE, tokens_per_s=2.0) == 8, "nothing is known yet: nobody waited for that pass"
    assert passes(SAMPLE, tokens_per_s=2.0) == 5
    assert passes(tokens_per_s=0.1) == 8, "nobody else waits"
    assert passes(SAMPLE, tokens_per_s=9.0, forward_only=True) == 5, "an evaluation tells nothing of passes"
    assert passes(SAMPLE, tokens_per_s=1.0) == 5, "it took twice as long as it may"
    assert passes(SAMPLE, tokens_per_s=2.0) == 3, "and that was meant half"


def test_a_pass_has_one_piece_at_least() -> None:
    waiting = queues(Bank(), tokens=40, max_pass_s=0.01)
    waiting.add(backward("a", 1, *[10] * 6))
    choices = []
    for _ in range(6):
        choices.append(waiting.choose({SAMPLE: 1}))
        if choices[-1].kind == TRAIN:
            waiting.take(choices[-1], 0.0)
        waiting.ran(choices[-1].kind, 1.0)
    assert [len(choice.data) for choice in choices if choice.kind == TRAIN] == [4, 1, 1]


def test_short_passes_do_not_make_the_next_ones_shorter() -> None:
    """Those that take 10 ms whatever is in them, and 1 ms a token."""
    tokens = PassTokens(0.1)
    for _ in range(30):
        now = min(200.0, tokens.limit)
        tokens.ran(int(now), 0.01 + 0.001 * int(now))
        for _ in range(5):
            tokens.ran(1, 0.011)
    assert 80 <= tokens.limit <= 95


def test_a_pass_that_compiles_or_is_refused_shifts_the_limit_by_half() -> None:
    tokens = PassTokens(0.1)
    tokens.ran(100, 0.1)
    tokens.ran(100, 10.0)
    assert 50 <= tokens.limit < 51
    tokens.ran(100, 0.0)
    assert 100 <= tokens.limit < 102
