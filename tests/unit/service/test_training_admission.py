"""How much training data is let in: counted where it lies, shared by owner and by model, never stuck."""

from __future__ import annotations

import random

import numpy as np
import pytest

from descant.errors import Overloaded
from descant.service.training_admission import (
    ARRAY_BYTES,
    BEHIND_SHARE,
    DATUM_BYTES,
    REQUEST_BYTES,
    Admitted,
    TrainingAdmission,
    held_bytes,
)
from descant.types import Datum, EncodedText, ForwardBackward

LIMIT = 1 << 20


def fill(admission: TrainingAdmission, owner: str, model_id: str, size: int, *, is_next: bool = True) -> int:
    """How many are let in, all of which the trainer then has, unless one before them is missing."""
    for number in range(LIMIT):
        try:
            admitted = admission.admit(owner, model_id, size, is_next=is_next)
        except Overloaded:
            return number
        if is_next:
            admission.submitted(admitted)
    raise AssertionError("there is no end")


def test_shares_by_owner_and_by_model():
    admission, size = TrainingAdmission("b", max_bytes=LIMIT), LIMIT // 1000
    assert fill(admission, "alice", "a", size) == pytest.approx(333, abs=1)
    assert fill(admission, "alice", "b", size) == pytest.approx(111, abs=2)
    assert fill(admission, "bob", "c", size) > 150
    for number in range(30):
        assert fill(admission, f"owner {number}", "m", size) >= 1
    assert admission.num_bytes < LIMIT


def test_who_has_nothing_begins_and_what_is_next_comes_when_nothing_runs():
    admission = TrainingAdmission("b", max_bytes=LIMIT)
    first = admission.admit("alice", "a", 10 * LIMIT, is_next=True)
    admission.submitted(first)
    with pytest.raises(Overloaded):
        admission.admit("alice", "a", 1, is_next=True)
    behind = admission.admit("bob", "b", 10 * LIMIT, is_next=False)
    with pytest.raises(Overloaded):
        admission.admit("bob", "b", 1, is_next=False)
    missing = admission.admit("bob", "b", 10 * LIMIT, is_next=True)
    for admitted in (missing, behind):
        admission.submitted(admitted)
    for admitted in (first, missing, behind):
        admission.release(admitted)
    assert admission.num_bytes == admission.waiting_bytes == 0
    assert admission._of_owner == admission._of_model == admission._waiting == admission._at_trainer == {}


def test_of_one_model_a_quarter_waits_behind_a_gap():
    admission = TrainingAdmission("b", max_bytes=LIMIT)
    size = LIMIT // 100
    assert fill(admission, "alice", "a", size, is_next=False) == LIMIT // BEHIND_SHARE // size
    with pytest.raises(Overloaded, match="wait for an earlier one"):
        admission.admit("alice", "a", size, is_next=False)
    admission.admit("alice", "b", size, is_next=False)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_sent_in_whatever_order_ends(seed: int):
    """Clients send what they have in any order and send again what was told to come again; trainers run what is next.
    All of it runs, and what is held stays within the limit and one request of each owner."""
    rng = random.Random(seed)
    admission = TrainingAdmission("b", max_bytes=LIMIT)
    most = LIMIT // 2
    models = {f"model {n}": f"owner {n % 3}" for n in range(6)}
    unsent = {model: {seq_id: rng.randint(1, most) for seq_id in range(1, 15)} for model in models}
    waiting: dict[str, dict[int, Admitted]] = {model: {} for model in models}
    running: list[Admitted] = []
    following = dict.fromkeys(models, 1)
    num_idle = 0
    while any(unsent.values()) or running:
        moved = False
        for model in rng.sample(sorted(models), len(models)):
            for seq_id in rng.sample(sorted(unsent[model]), min(4, len(unsent[model]))) + sorted(unsent[model])[:1]:
                if seq_id not in unsent[model]:
                    continue
                is_next = seq_id == following[model]
                try:
                    admitted = admission.admit(models[model], model, unsent[model][seq_id], is_next=is_next)
                except Overloaded:
                    continue
                moved = True
                del unsent[model][seq_id]
                waiting[model][seq_id] = admitted
                while following[model] in waiting[model]:
                    admission.submitted(ready := waiting[model].pop(following[model]))
                    running.append(ready)
                    following[model] += 1
                assert admission.num_bytes <= LIMIT + 2 * 3 * most
        if running and rng.random() < 0.7:
            admission.release(running.pop(rng.randrange(len(running))))
            moved = True
        num_idle = 0 if moved else num_idle + 1
        assert num_idle < 50, "nothing moves any more"
    assert following == dict.fromkeys(models, 15)
    assert admission.num_bytes == 0


def test_a_view_keeps_its_whole_buffer_and_small_things_count():
    body = bytes(1 << 20)
    views = [np.frombuffer(body, np.int32)[4 * n : 4 * n + 4] for n in range(10)]
    data = tuple(
        Datum(model_input=(EncodedText(tokens=view),), loss_fn_inputs={"target_tokens": np.zeros(4, np.int64)})
        for view in views
    )
    command = ForwardBackward(model_id="m", seq_id=1, data=data, loss_fn="cross_entropy")
    assert held_bytes(command) == REQUEST_BYTES + len(body) + 10 * (32 + DATUM_BYTES + 2 * ARRAY_BYTES)
    empty = ForwardBackward(
        model_id="m", seq_id=1, data=(Datum(model_input=(), loss_fn_inputs={}),) * 1000, loss_fn="x"
    )
    assert held_bytes(empty) == REQUEST_BYTES + 1000 * DATUM_BYTES
