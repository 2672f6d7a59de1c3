"""The decision, as a table: what waits → what runs next. Decided by ``Shares`` and ``FairQueue``, which are kept up to
date, and by the plain reference."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from descant.ranks import fair_queue
from descant.ranks.decide import IDLE, ROWS, SAMPLE, TRAIN, Choice, Kind, SamplingRank, Shares, sampling_rank
from descant.ranks.fair_queue import STARVATION_BOUND, FairQueue, runtime_on_arrival
from descant.ranks.partition import WaitingDatum, balanced_shares, cut_into_pieces, piece_at, piece_shares
from descant.testing import reference_queues
from descant.testing.reference_queues import ModelView, Past, Waiting
from descant.train.runner import Part
from descant.types import AdamParams, Command, OptimStep

BUDGET = 100


@dataclass(slots=True, eq=False, kw_only=True)
class Viewed(fair_queue.WaitingModel):
    view: ModelView

    def pieces(self) -> Iterator[Sequence[WaitingDatum]]:
        data, at = self.view.data, 0
        while at < len(data):
            piece = piece_at(data, at)
            yield piece
            at += len(piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewedMemory:
    models: dict[str, ModelView]
    adapter_bytes: int

    def bytes_in_use(self, model_id: str) -> tuple[int, int]:
        return self.models[model_id].own_bytes, self.models[model_id].request_bytes

    def is_resident(self, model_id: str) -> bool:
        return self.models[model_id].resident


def queue_of(models: Sequence[ModelView], adapter_bytes: int = sys.maxsize) -> FairQueue[Viewed]:
    """As it is when these wait."""
    memory = ViewedMemory(models={model.model_id: model for model in models}, adapter_bytes=adapter_bytes)
    made: FairQueue[Viewed] = FairQueue(memory)
    for skipped in range(max((model.skipped_passes for model in models), default=0), -1, -1):
        for arrival, model in enumerate(models):
            if model.data and model.skipped_passes == skipped:
                fields = {"virtual_runtime": model.virtual_runtime, "open_requests": model.open_requests}
                made.add(Viewed(view=model, model_id=model.model_id, arrival=arrival, **fields))
        if skipped:
            made.skip_others(())
    return made


def decide(
    state: Waiting,
    *,
    microbatch_tokens: int,
    shares: Shares | None = None,
    packable: bool = True,
    adapter_bytes: int = sys.maxsize,
) -> Choice:
    """``shares``: after the turns of ``state.past``."""
    shares = shares or Shares({TRAIN: 1.0, SAMPLE: 1.0})
    rows = tuple(command for model in state.models for command in model.rows)
    training = queue_of(state.models, adapter_bytes)
    waiting = [kind for kind, has in ((ROWS, rows), (TRAIN, len(training)), (SAMPLE, state.sampling)) if has]
    kind = shares.next(waiting)
    data = training.fill(microbatch_tokens if packable else 0) if kind == TRAIN else ()
    choice = Choice(kind=kind, data=data, commands=rows if kind == ROWS else ())
    assert choice == reference_queues.decide(
        state, microbatch_tokens=microbatch_tokens, packable=packable, adapter_bytes=adapter_bytes
    )
    return choice


def step(model_id: str, seq_id: int = 9) -> OptimStep:
    return OptimStep(model_id=model_id, seq_id=seq_id, adam_params=AdamParams())


def data(model_id: str, *tokens: int, virtual_runtime: int = 0, seq_id: int = 1) -> ModelView:
    """A model with datums of these lengths at its head."""
    waiting = tuple(
        WaitingDatum(part=Part(request=(model_id, seq_id), datum=i), tokens=n) for i, n in enumerate(tokens)
    )
    return ModelView(model_id=model_id, data=waiting, virtual_runtime=virtual_runtime)


def rows(model_id: str, *commands: Command) -> ModelView:
    return ModelView(model_id=model_id, rows=commands or (step(model_id),))


def waiting(*models: ModelView, sampling: bool = False) -> Waiting:
    return Waiting(models=models, sampling=sampling)


def picked(choice: Choice) -> list[str]:
    """``a0`` is datum 0 of model a; a row command is its model and seq_id."""
    if choice.kind == ROWS:
        return [f"{command.model_id}@{command.seq_id}" for command in choice.commands]
    return [f"{part.request[0]}{part.datum}" for part in choice.parts]


@pytest.mark.parametrize(
    ("state", "kind", "expected"),
    [
        pytest.param(waiting(), IDLE, [], id="nothing waits"),
        pytest.param(waiting(ModelView(model_id="a")), IDLE, [], id="a checkpoint is being read"),
        pytest.param(waiting(sampling=True), SAMPLE, [], id="only sampling"),
        pytest.param(waiting(data("a", 10, 20)), TRAIN, ["a0", "a1"], id="one model, in order"),
        pytest.param(waiting(data("a", 10, 10), data("b", 10, 10)), TRAIN, ["a0", "b0", "a1", "b1"], id="models join"),
        pytest.param(waiting(data("a", 60, 60)), TRAIN, ["a0"], id="the budget holds"),
        pytest.param(waiting(data("a", 60, 40, 1)), TRAIN, ["a0", "a1"], id="the budget may be met exactly"),
        pytest.param(waiting(data("a", 500, 1), data("b", 1, virtual_runtime=1)), TRAIN, ["a0"], id="too large: alone"),
        pytest.param(
            waiting(data("a", 500, virtual_runtime=5), data("b", 1, 1)),
            TRAIN,
            ["b0", "b1"],
            id="too large waits for a pass of its own",
        ),
        pytest.param(
            waiting(data("a", 60, 90, 1), data("b", 30, virtual_runtime=70)),
            TRAIN,
            ["a0", "b0"],
            id="what does not fit is not overtaken by its own model, but by others",
        ),
        pytest.param(
            waiting(data("heavy", *[30] * 9, virtual_runtime=900), data("light", 20)),
            TRAIN,
            ["light0", "heavy0", "heavy1"],
            id="the least runtime goes first",
        ),
        pytest.param(
            waiting(data("a", *[20] * 9), data("b", *[20] * 9, virtual_runtime=40)),
            TRAIN,
            ["a0", "a1", "a2", "b0", "a3"],
            id="inside a pass, too",
        ),
        pytest.param(
            waiting(rows("a"), rows("b", step("b", 3), step("b", 4)), data("c", 10), sampling=True),
            ROWS,
            ["a@9", "b@3", "b@4"],
            id="rows first, all of them, in order",
        ),
    ],
)
def test_decide(state: Waiting, kind: str, expected: list[str]) -> None:
    choice = decide(state, microbatch_tokens=BUDGET)
    assert (choice.kind, picked(choice)) == (kind, expected)


MS = 2.0**-10
"""What is usual before any turn."""
ALL = waiting(rows("a"), data("b", 10), sampling=True)
BOTH = waiting(data("b", 10), sampling=True)


@pytest.mark.parametrize(
    ("state", "turns", "share", "kind"),
    [
        pytest.param(ALL, [(ROWS, MS)], 1.0, SAMPLE, id="rows not twice in a row, but a step"),
        pytest.param(waiting(rows("a"), data("b", 10)), [(ROWS, MS)], 1.0, TRAIN, id="or a pass"),
        pytest.param(waiting(rows("a")), [(ROWS, MS)], 1.0, ROWS, id="rows again when nothing else waits"),
        pytest.param(ALL, [(TRAIN, MS)], 1.0, ROWS, id="a new tenant gets in between two passes"),
        pytest.param(BOTH, [], 1.0, SAMPLE, id="of equals training is the last"),
        pytest.param(BOTH, [(SAMPLE, MS)], 1.0, TRAIN, id="the sampler has had its share"),
        pytest.param(BOTH, [(SAMPLE, MS), (TRAIN, 2 * MS)], 1.0, SAMPLE, id="training has had more"),
        pytest.param(BOTH, [(SAMPLE, MS), (TRAIN, 3 * MS), (SAMPLE, MS)], 1.0, SAMPLE, id="for as long as that was"),
        pytest.param(BOTH, [(SAMPLE, MS), (TRAIN, 3 * MS), (SAMPLE, 3 * MS)], 1.0, TRAIN, id="and no longer"),
        pytest.param(BOTH, [(SAMPLE, 9 * MS), (TRAIN, MS)], 1.0, SAMPLE, id="not two passes in a row"),
        pytest.param(BOTH, [(SAMPLE, 9 * MS), (TRAIN, MS), (ROWS, MS)], 1.0, SAMPLE, id="nor with rows in between"),
        pytest.param(BOTH, [(SAMPLE, 9 * MS), (TRAIN, MS)], 0.5, TRAIN, id="unless the share is less than one"),
        pytest.param(BOTH, [(SAMPLE, 2 * MS), (TRAIN, 3 * MS), (SAMPLE, 7 * MS)], 4.0, SAMPLE, id="by its share"),
        pytest.param(BOTH, [(TRAIN, 9999.0), *[(SAMPLE, MS)] * 9], 1.0, SAMPLE, id="a pass that compiles counts"),
        pytest.param(BOTH, [(TRAIN, 9999.0), *[(SAMPLE, MS)] * 16], 1.0, TRAIN, id="but not for all that it took"),
        pytest.param(BOTH, [(SAMPLE, 0.0), (TRAIN, 0.0), (SAMPLE, 0.0)], 1.0, TRAIN, id="under a clock that stands"),
    ],
)
def test_which_kind_is_next(state: Waiting, turns: list[tuple[Kind, float]], share: float, kind: Kind) -> None:
    """After ``turns`` that took so long, while training and sampling both waited."""
    shares, past = Shares({TRAIN: 1.0, SAMPLE: share}), Past()
    for ran, seconds in turns:
        shares.next({TRAIN, SAMPLE})
        shares.ran(ran, seconds)
        past = past.after(ran, seconds, time_share=share, both_wait=True)
    assert decide(replace(state, past=past), microbatch_tokens=BUDGET, shares=shares).kind == kind


def test_not_packable_takes_one_datum_a_pass() -> None:
    state = waiting(data("a", 10, 10), data("b", 10))
    assert picked(decide(state, microbatch_tokens=BUDGET, packable=False)) == ["a0"]


def costly(model: ModelView, own_bytes: int, request_bytes: int = 0, open_requests: int = 0) -> ModelView:
    return replace(model, own_bytes=own_bytes, request_bytes=request_bytes, open_requests=open_requests)


def later(model_id: str, *tokens: int, at: int = 1, **fields: int) -> ModelView:
    """Its request has begun: the datums before ``at`` have run."""
    parts = tuple(WaitingDatum(part=Part(request=(model_id, 1), datum=at + i), tokens=n) for i, n in enumerate(tokens))
    return ModelView(model_id=model_id, data=parts, **fields)


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        pytest.param([costly(data(m, 10, 10), 5) for m in "abc"], ["a0", "b0", "a1", "b1"], id="what fits joins"),
        pytest.param([costly(data("a", 10), 50), costly(data("b", 10), 5)], ["a0"], id="too large: alone"),
        pytest.param(
            [costly(data("a", 10, virtual_runtime=9), 50), costly(data("b", 10), 5)],
            ["b0"],
            id="too large waits for its turn",
        ),
        pytest.param(
            [costly(data("a", 10), 8), costly(data("b", 10), 8), costly(data("c", 10), 2)],
            ["a0", "c0"],
            id="a smaller one fits",
        ),
        pytest.param(
            [
                costly(data("a", 10, 10), 5),
                costly(later("b", 10, 10, virtual_runtime=500), 5, 0, 1),
                costly(data("c", 10), 5),
            ],
            ["a0", "a1", "b1", "b2"],
            id="an open request has its room already, and goes on",
        ),
        pytest.param(
            [costly(data("a", 10), 5), costly(later("b", 10, virtual_runtime=500), 20, 0, 1)],
            ["b1"],
            id="open ones beyond the limit: they end first",
        ),
        pytest.param(
            [
                ModelView(
                    model_id="a",
                    data=tuple(WaitingDatum(part=Part(request=("a", seq), datum=0), tokens=1) for seq in range(4)),
                    own_bytes=6,
                    request_bytes=2,
                )
            ],
            ["a0", "a0", "a0"],
            id="each further request takes a gradient row",
        ),
    ],
)
def test_no_more_adapters_than_fit(models: list[ModelView], expected: list[str]) -> None:
    choice = decide(waiting(*models), microbatch_tokens=BUDGET, adapter_bytes=10)
    assert picked(choice) == expected


def out(model: ModelView, skipped_passes: int = 0) -> ModelView:
    """Its rows are not on the device."""
    return replace(model, resident=False, skipped_passes=skipped_passes)


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        pytest.param(
            [out(data("a", 10)), data("b", 10, virtual_runtime=500)], ["b0", "a0"], id="resident ones go first"
        ),
        pytest.param([out(data("a", 10)), data("b", 95)], ["b0"], id="and alone where there is no room for both"),
        pytest.param([out(data("a", 10), 1), data("b", 95)], ["a0"], id="but once only"),
        pytest.param(
            [out(data("a", 10, virtual_runtime=1), 1), data("b", 95)], ["b0"], id="then it is like the others"
        ),
        pytest.param([out(data("a", 10)), out(data("b", 10))], ["a0", "b0"], id="none is resident"),
        pytest.param(
            [data("a", 95), replace(data("b", 95, virtual_runtime=900), skipped_passes=4)],
            ["b0"],
            id="none is skipped for longer than the bound",
        ),
        pytest.param(
            [data("a", 60), replace(data("b", 40, 1, 9, virtual_runtime=900), skipped_passes=4)],
            ["b0", "a0"],
            id="which is one datum's right",
        ),
        pytest.param(
            [replace(data("a", 95), skipped_passes=4), replace(data("b", 95, virtual_runtime=900), skipped_passes=5)],
            ["b0"],
            id="of several the one that has waited longest",
        ),
    ],
)
def test_offloaded_models_are_skipped_for_one_pass_and_none_beyond_the_bound(
    models: list[ModelView], expected: list[str]
) -> None:
    assert picked(decide(waiting(*models), microbatch_tokens=BUDGET)) == expected


@pytest.mark.parametrize(("skipped_passes", "expected"), [(7, ["c0", "b1"]), (8, ["b1"])])
def test_what_is_too_large_beside_others_is_admitted_at_the_bound(skipped_passes: int, expected: list[str]) -> None:
    models = [
        costly(out(data("a", 10), skipped_passes), 8),
        costly(later("b", 10, virtual_runtime=500), 5, 0, 1),
        costly(data("c", 10), 5),
        data("d", 95),
    ]
    assert picked(decide(waiting(*models), microbatch_tokens=BUDGET, adapter_bytes=10)) == expected


COSTS = {"a": 1, "b": 1, "c": 1, "d": 2, "e": 4}
MAX_DATUMS = 3


@given(
    lengths=st.fixed_dictionaries({model: st.sampled_from([1, 20, 150]) for model in COSTS}),
    datums=st.fixed_dictionaries({model: st.integers(1, MAX_DATUMS) for model in COSTS}),
    pause=st.integers(0, 3),
    room=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_no_model_starves_whichever_arrive_and_are_resident(
    lengths: dict[str, int], datums: dict[str, int], pause: int, room: int, seed: int
) -> None:
    """Each asks again up to ``pause`` passes after its answer, sometimes twice. Of the rows of those who have run last,
    as many as fit are here."""
    random = Random(seed)
    queues: dict[str, list[list[int]]] = {}
    comes = dict.fromkeys(COSTS, 0)
    begun, served, skipped_passes = Counter[str](), Counter[str](), Counter[str]()
    last = 0
    here: list[str] = []
    for number in range(200):
        for model in [model for model, at in comes.items() if at == number]:
            served[model] = reference_queues.runtime_on_arrival(
                served[model], [served[other] for other in queues], last
            )
            skipped_passes[model] = 0
            queues[model] = [
                [random.randint(1, lengths[model]) for _ in range(datums[model])]
                for _ in range(random.choice([1, 1, 2]))
            ]
        models = [
            ModelView(
                model_id=model,
                data=tuple(
                    WaitingDatum(part=Part(request=(model, -left), datum=at), tokens=tokens)
                    for left, tokens_of in zip(range(len(requests), 0, -1), requests)
                    for at, tokens in enumerate(tokens_of)
                    if left < len(requests) or at >= begun[model]
                ),
                virtual_runtime=served[model],
                own_bytes=COSTS[model],
                open_requests=int(begun[model] > 0),
                resident=model in here,
                skipped_passes=skipped_passes[model],
            )
            for model, requests in queues.items()
        ]
        choice = decide(waiting(*models), microbatch_tokens=BUDGET, adapter_bytes=room)
        taken = {part.request[0] for part in choice.parts}
        assert taken or not queues
        last = min((served[model] for model in taken), default=last)
        for model in queues.keys() - taken:
            skipped_passes[model] += 1
            assert skipped_passes[model] <= len(COSTS) * (STARVATION_BOUND + 2 * MAX_DATUMS)
        for model, _ in (part.request for part in choice.parts):
            skipped_passes[model] = 0
            served[model] += queues[model][0][begun[model]]
            begun[model] += 1
            if begun[model] == len(queues[model][0]):
                begun[model] = 0
                del queues[model][0]
        for model in [model for model, requests in queues.items() if not requests]:
            del queues[model]
            comes[model] = number + random.randint(1, 1 + pause)
        here = [*sorted(taken), *(model for model in here if model not in taken)]
        while sum(COSTS[model] for model in here) > room and len(here) > 1:
            here.pop()


def run(models: dict[str, list[int]], *, sampling: bool, share: float, turns: int) -> list[tuple[Kind, list[str]]]:
    """Plays the loop on queues of datum lengths (a queue never ends when it is refilled by the caller). A step takes
    half as long as a training turn."""
    served = dict.fromkeys(models, 0)
    at = dict.fromkeys(models, 0)
    shares, past = Shares({TRAIN: 1.0, SAMPLE: share}), Past()
    log = []
    for _ in range(turns):
        heads = tuple(
            ModelView(
                model_id=m,
                data=tuple(
                    WaitingDatum(part=Part(request=(m, 1), datum=i), tokens=models[m][i])
                    for i in range(at[m], len(models[m]))
                ),
                virtual_runtime=served[m],
            )
            for m in models
        )
        choice = decide(Waiting(models=heads, sampling=sampling, past=past), microbatch_tokens=BUDGET, shares=shares)
        for part in choice.parts:
            m = part.request[0]
            assert part.datum == at[m], "a model's datums run in order, each once"
            at[m] += 1
            served[m] += models[m][part.datum]
        seconds = 2 * MS if choice.kind == TRAIN else MS
        shares.ran(choice.kind, seconds)
        both_wait = sampling and any(model.data for model in heads)
        past = past.after(choice.kind, seconds, time_share=share, both_wait=both_wait)
        log.append((choice.kind, picked(choice)))
        if choice.kind == IDLE:
            break
    return log


@pytest.mark.parametrize(("share", "steps"), [(1.0, 2), (2.0, 4), (4.0, 8)])
def test_a_token_waits_for_one_microbatch_at_most_and_training_goes_on(share: float, steps: int) -> None:
    kinds = [kind for kind, _ in run({"a": [80] * 50}, sampling=True, share=share, turns=80)]
    text = "".join(kind[0] for kind in kinds)
    assert "tt" not in text
    assert "t" + "s" * steps + "t" in text
    assert "s" * (steps + 1) not in text[steps + 1 :]


def test_a_light_tenant_is_not_behind_a_heavy_ones_queue() -> None:
    log = run({"heavy": [90] * 100, "light": [10] * 3}, sampling=False, share=1, turns=100)
    assert [i for i, (_, parts) in enumerate(log) if any(p.startswith("light") for p in parts)][-1] <= 4


def test_a_newcomer_does_not_shut_the_others_out() -> None:
    assert runtime_on_arrival(0, 5000) == 5000
    assert runtime_on_arrival(6000, 5000) == 6000
    assert reference_queues.runtime_on_arrival(0, [5000, 7000]) == 5000
    assert reference_queues.runtime_on_arrival(6000, [5000, 7000]) == 6000
    assert reference_queues.runtime_on_arrival(40, []) == 40
    assert reference_queues.runtime_on_arrival(40, [], last=900) == 900
    assert reference_queues.runtime_on_arrival(40, [30], last=900) == 40


@given(
    st.dictionaries(
        st.sampled_from("abcde"), st.lists(st.integers(1, 150), min_size=1, max_size=12), min_size=1, max_size=5
    ),
    st.booleans(),
    st.sampled_from([0.5, 1.0, 4.0]),
)
def test_everything_runs_once_within_the_budget_and_nothing_starves(
    models: dict[str, list[int]], sampling: bool, share: float
) -> None:
    log = run(models, sampling=sampling, share=share, turns=600)
    ran = Counter(part for _, parts in log for part in parts)
    assert ran == Counter({f"{m}{i}": 1 for m, lengths in models.items() for i in range(len(lengths))})
    for _, parts in log:
        tokens = [models[part[0]][int(part[1:])] for part in parts]
        assert sum(tokens) <= BUDGET or len(tokens) == 1
    served = dict.fromkeys(models, 0)
    for _, parts in log:
        for part in parts:
            served[part[0]] += models[part[0]][int(part[1:])]
        for m in models:  # whoever still waits is behind nobody by more than a pass and a datum
            if served[m] < sum(models[m]):
                assert max(served.values()) - served[m] <= BUDGET + 150


def test_what_datums_share_is_paid_once_a_pass() -> None:
    """Eight samples of a prompt of 60, 10 tokens each: the first costs 70, the others 10; in the next pass again."""
    model_id, key = "a", ("a", 1)
    samples = [WaitingDatum(part=Part(request=key, datum=i), tokens=70, shared=60 if i else 0) for i in range(8)]

    def next_pass(first: int) -> list[str]:
        return picked(decide(waiting(ModelView(model_id=model_id, data=tuple(samples[first:]))), microbatch_tokens=100))

    assert next_pass(0) == ["a0", "a1", "a2", "a3"]
    assert next_pass(4) == ["a4", "a5", "a6", "a7"]
    assert next_pass(7) == ["a7"]


def test_sharing_has_an_end() -> None:
    same = tuple(
        WaitingDatum(part=Part(request=("a", 1), datum=i), tokens=80, shared=80 if i else 0) for i in range(100)
    )
    choice = decide(waiting(ModelView(model_id="a", data=same)), microbatch_tokens=100)
    assert len(choice.parts) == 3  # 80 + 10 + 10


# ---------------------------------------------------------------------------------------------------- several ranks


def request(*tokens: int, model: str = "a", shared: int = 0) -> list[WaitingDatum]:
    """One request's datums; each but the first shares ``shared`` tokens with the one before it."""
    return [
        WaitingDatum(part=Part(request=(model, 1), datum=index), tokens=count, shared=shared if index else 0)
        for index, count in enumerate(tokens)
    ]


@pytest.mark.parametrize(
    ("data", "num_ranks", "expected"),
    [
        pytest.param(request(10, 10, 10, shared=9), 2, ["a0 a1 a2", ""], id="unless the prefix is nearly all"),
        pytest.param([*request(5, 50), *request(7, model="b")], 1, ["a0 a1 b0"], id="one rank: one pass, in order"),
        pytest.param(request(8, 3, 5, 2), 2, ["a0 a3", "a1 a2"], id="even in tokens, in order on each"),
        pytest.param(request(3), 3, ["a0", "", ""], id="fewer datums than ranks"),
        pytest.param(request(9, 9, 9), 2, ["a0 | a2", "a1 |"], id="passes within the budget, as many on each rank"),
        pytest.param(request(30, 2, 2), 2, ["a0", "a1 a2"], id="larger than the budget: a pass of its own"),
        pytest.param(
            [*request(10, 10, shared=8), *request(6, 6, model="b", shared=4)],
            2,
            ["a0 a1", "b0 b1"],
            id="what shares a prefix stays together",
        ),
        pytest.param(
            request(4, *[7] * 7, shared=4), 2, ["a4 a5 a6 a7", "a0 a1 a2 a3"], id="unless it is much more than even"
        ),
    ],
)
def test_datums_are_shared_out(data: list[WaitingDatum], num_ranks: int, expected: list[str]) -> None:
    shares = balanced_shares(data, num_ranks, pass_tokens=16)
    shown = [
        " | ".join(" ".join(f"{part.request[0]}{part.datum}" for part in parts) for parts in passes).strip()
        for passes in shares
    ]
    assert shown == expected


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=40),
    num_models=st.integers(1, 3),
    num_ranks=st.integers(1, 5),
)
def test_every_datum_is_on_one_rank_and_no_rank_has_much_more(
    lengths: list[tuple[int, int]], num_models: int, num_ranks: int
) -> None:
    seen: Counter[int] = Counter()
    data = []
    for index, (tokens, shared) in enumerate(lengths):
        model = index % num_models
        part = Part(request=(f"m{model}", 1), datum=seen[model])
        shared = min(shared, tokens - 1) if seen[model] else 0
        seen[model] += 1
        data.append(WaitingDatum(part=part, tokens=tokens, shared=shared))
    shares = balanced_shares(data, num_ranks, pass_tokens=50)
    piece_shares = [part for passes in shares for parts in passes for part in parts]
    assert Counter(piece_shares) == Counter(datum.part for datum in data)
    assert len({len(passes) for passes in shares}) == 1
    tokens_of = {datum.part: datum.tokens for datum in data}
    if num_ranks > 1:
        for passes in shares:
            own = [part for parts in passes for part in parts]
            assert own == sorted(own, key=dealt_order(data).__getitem__)
    if num_ranks > 1 and all(datum.shared == 0 for datum in data):
        loads = [sum(tokens_of[part] for parts in passes for part in parts) for passes in shares]
        assert max(loads) - min(loads) <= max(tokens_of.values())
        assert all(sum(map(tokens_of.__getitem__, parts)) <= 50 for passes in shares for parts in passes)


def dealt_order(data: list[WaitingDatum]) -> dict[Part, int]:
    return {datum.part: index for index, datum in enumerate(data)}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param([(3, 0), (2, 0), (2, 0)], 1, id="nothing kept: the fewest, of these the first"),
        pytest.param([(0, 0), (4, 1024)], 1, id="where it is kept, as long as there is room for the lead"),
        pytest.param([(0, 0), (5, 2048)], 0, id="not where the lead is more than its room"),
        pytest.param([(0, 0), (2, 256)], 0, id="not where the lead costs more than what is kept"),
        pytest.param([(3, 0), (5, 512)], 1, id="the lead counts, not the load"),
        pytest.param([(7, 0), (8, 2560)], 0, id="a full one has no room to lead"),
        pytest.param([(9, 0), (9, 64)], 1, id="over full, but no more than the other"),
        pytest.param([(0, 64), (3, 1024), (2, 1024)], 2, id="most, of these the fewest sequences"),
        pytest.param([(0, 64), (6, 2560), (1, 256)], 2, id="one that is too far ahead does not stand for the others"),
    ],
)
def test_a_request_samples_where_its_prompt_is_kept(ranks: list[tuple[int, int]], expected: int) -> None:
    of = [SamplingRank(sequences=sequences, cached_tokens=kept) for sequences, kept in ranks]
    assert sampling_rank(of, max_num_seqs=8) == expected


# ------------------------------------------------------------------------------------------------------------ pieces


def shown(data: Sequence[WaitingDatum]) -> str:
    """``1+2`` are one piece."""
    return "".join(f"{'+' if datum.joins else ' '}{datum.part.datum}" for datum in data).strip()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(request(3, 3, 3), "0+1+2", id="one that is small is one piece"),
        pytest.param(request(8, 8, 8), "0+1 2", id="a piece may be filled exactly"),
        pytest.param(request(8, 40, 8, 8), "0 1 2+3", id="larger than a piece: one by itself"),
        pytest.param(
            [
                *request(10),
                *(replace(d, part=replace(d.part, datum=i)) for i, d in enumerate(request(9, 9, shared=8), 1)),
            ],
            "0 1+2",
            id="what shares a prefix is not torn apart",
        ),
        pytest.param(request(8, 8, 8, shared=7), "0+1+2", id="what is shared is paid once"),
        pytest.param(request(10, *[10] * 6, shared=7), "0+1+2 3+4+5 6", id="unless it is more than a piece"),
    ],
)
def test_a_request_is_cut_into_pieces(data: list[WaitingDatum], expected: str) -> None:
    assert shown(cut_into_pieces(data, 1, piece_tokens=16)) == expected


def test_turns_carry_whole_pieces_and_each_is_a_pass() -> None:
    a, b = (cut_into_pieces(request(6, 6, 6, 6, 6, model=model), 1, piece_tokens=16) for model in "ab")
    models = [ModelView(model_id=model, data=data) for model, data in (("a", a), ("b", b))]
    choice = decide(waiting(*models), microbatch_tokens=40)
    assert picked(choice) == ["a0", "a1", "b0", "b1", "a2", "a3"]
    [passes] = piece_shares(choice.data, 1)
    assert [[f"{part.request[0]}{part.datum}" for part in parts] for parts in passes] == [
        ["a0", "a1"],
        ["b0", "b1"],
        ["a2", "a3"],
    ]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=30),
    num_ranks=st.integers(1, 4),
    neighbours=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=8), max_size=3),
    served=st.lists(st.integers(0, 200), min_size=4, max_size=4),
    budget=st.integers(1, 120),
)
def test_a_requests_passes_are_the_same_beside_any_neighbours(
    lengths: list[tuple[int, int]],
    num_ranks: int,
    neighbours: list[list[int]],
    served: list[int],
    budget: int,
) -> None:
    """Also on which ranks they are, and in which order they are added up there."""
    mine = [
        WaitingDatum(part=Part(request=("mine", 1), datum=i), tokens=tokens, shared=min(shared, tokens - 1) if i else 0)
        for i, (tokens, shared) in enumerate(lengths)
    ]
    others = {f"m{i}": request(*tokens, model=f"m{i}") for i, tokens in enumerate(neighbours)}

    def passes(batch: dict[str, list[WaitingDatum]]) -> list[list[tuple[Part, ...]]]:
        """Mine, by rank."""
        left = {name: list(cut_into_pieces(data, num_ranks, piece_tokens=32)) for name, data in batch.items()}
        found: list[list[tuple[Part, ...]]] = [[] for _ in range(num_ranks)]
        had = dict(zip(left, served))
        while left:
            models = [
                ModelView(model_id=name, data=tuple(data), virtual_runtime=had[name]) for name, data in left.items()
            ]
            choice = decide(waiting(*models), microbatch_tokens=budget)
            for own, of_rank in zip(found, piece_shares(choice.data, num_ranks), strict=True):
                assert all(len({part.request for part in parts}) <= 1 for parts in of_rank)
                own += [parts for parts in of_rank if parts and parts[0].request[0] == "mine"]
            for name in {part.request[0] for part in choice.parts}:
                taken = sum(part.request[0] == name for part in choice.parts)
                had[name] += sum(datum.tokens for datum in left[name][:taken])
                left[name] = left[name][taken:]
            left = {name: data for name, data in left.items() if data}
        return found

    alone = passes({"mine": mine})
    assert passes({**others, "mine": mine}) == alone
    ran = [part.datum for of_rank in alone for parts in of_rank for part in parts]
    assert sorted(ran) == list(range(len(mine)))
    if num_ranks == 1:
        assert ran == sorted(ran)
