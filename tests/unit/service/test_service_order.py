"""Order and de-duplication, through the whole service."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from service_harness import BASE, Harness, forward_backward

from descant.errors import DescantError, Overloaded, UserError
from descant.service.command_queue import MAX_CONSUMED
from descant.service.futures import Submitted
from descant.types import CreateModel, ForwardBackward, FutureKey, OptimStep, Rejected, Snapshot


async def test_any_order_of_arrival_equals_the_sequential_run(harness: Harness) -> None:
    expected = await harness.model()
    for seq_id in (1, 2, 3, 4):
        await harness.result(await (harness.fb if seq_id % 2 else harness.step)(expected, seq_id))
    session = await harness.session()
    for number, order in enumerate(list(permutations((1, 2, 3, 4)))[::5]):
        model = await harness.model(session, model_seq_id=number)
        sent = await asyncio.gather(*((harness.fb if seq_id % 2 else harness.step)(model, seq_id) for seq_id in order))
        for submitted in sent:
            await harness.result(submitted)
        np.testing.assert_array_equal(harness.weights(model), harness.weights(expected))
    assert np.abs(harness.weights(expected)).max() > 0


async def test_the_same_request_sent_twice_runs_once(harness: Harness) -> None:
    model = await harness.model()
    sent = await asyncio.gather(*(harness.fb(model, 1) for _ in range(5)), *(harness.step(model, 2) for _ in range(5)))
    assert len({submitted.request_id for submitted in sent}) == 2
    answers = [await harness.result(submitted) for submitted in sent]
    assert len({repr(answer) for answer in answers}) == 2
    assert (await harness.fb(model, 1)).request_id == sent[0].request_id, "also after it has ended"
    assert [type(command) for command in harness.trainer.commands] == [CreateModel, ForwardBackward, OptimStep]


async def test_creating_twice_creates_once_and_zero_is_a_number(harness: Harness) -> None:
    session = await harness.session()
    sent = await asyncio.gather(*(harness.create(session, 0) for _ in range(4)), harness.create(session, 1))
    assert len({submitted.request_id for submitted in sent}) == 2
    assert sent[0].model_id == f"{session}:train:0"
    for submitted in sent:
        await harness.result(submitted)
    assert len(harness.trainer.commands) == 2


async def test_two_samplers_of_one_model_both_at_zero(harness: Harness) -> None:
    model = await harness.model()
    ids = []
    for number in (0, 1):
        saved = await harness.result(await harness.sampler(model, 1 + number, number=number))
        ids.append(saved.sampling_session_id)
    sent = [await harness.sample(sampling_session_id, 0) for sampling_session_id in ids]
    assert sent[0].request_id != sent[1].request_id
    assert sent[0].sample_sequence_ids == (f"{ids[0]}:0:0",)
    for submitted in sent:
        await harness.result(submitted)
    assert (await harness.sample(ids[0], 0)).request_id == sent[0].request_id


async def test_a_client_that_goes_away_leaves_no_promise_behind(harness: Harness) -> None:
    model = await harness.model()
    gone = asyncio.create_task(harness.fb(model, 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await harness.result(await harness.fb(model, 1))


async def test_what_waits_behind_a_gap_fails_at_its_deadline(harness: Harness) -> None:
    model = await harness.model()
    await harness.result(await harness.fb(model, 1))
    behind = [await harness.fb(model, 3), await harness.step(model, 4), await harness.save(model, 5)]
    await harness.advance(329.0)
    assert "waits for seq_id 2" in await harness.pending(behind[0])
    before = harness.weights(model).copy()
    await harness.advance(2.0)
    for submitted in behind:
        error = await harness.error(submitted)
        assert error.category == "user"
        assert "seq_id 2 did not arrive within 330 s" in error.message
    late = await harness.error(await harness.fb(model, 2))
    assert "seq_id 2 did not arrive within 330 s" in late.message
    np.testing.assert_array_equal(harness.weights(model), before)
    await harness.result(await harness.fb(model, 6))
    await harness.result(await harness.step(model, 7))
    assert not await harness.checkpoints.list()


async def test_the_first_step_after_a_closed_gap_fails_and_the_next_works(harness: Harness) -> None:
    model, clean = await harness.model(), await harness.model()
    await harness.result(await harness.fb(model, 1))
    await harness.fb(model, 3)
    await harness.advance(331.0)
    error = await harness.error(await harness.step(model, 4))
    assert error.category == "user"
    assert not harness.weights(model).any()
    await harness.result(await harness.fb(model, 5))
    await harness.result(await harness.step(model, 6))
    await harness.result(await harness.train(forward_backward(clean, 1)))
    await harness.result(await harness.step(clean, 2))
    assert harness.weights(model).any()


@pytest.mark.parametrize(
    ("waiting", "next_step_works"),
    [
        ("s", True),
        ("ss", True),
        ("b", False),
        ("bs", True),
        ("sb", False),
        ("sbs", True),
        ("sf", True),
        ("sfs", True),
        ("f", False),
    ],
)
async def test_nothing_that_waited_behind_a_gap_is_stepped(
    harness: Harness, waiting: str, next_step_works: bool
) -> None:
    """s: a step, b: a backward, f: a forward. What is sent fresh afterwards is the whole of the next step."""
    model, clean = await harness.model(), await harness.model()
    for one in (model, clean):
        await harness.result(await harness.fb(one, 1))
        await harness.result(await harness.step(one, 2))  # so that any step would move something
    await harness.result(await harness.fb(model, 3))
    sent = []
    for seq_id, kind in enumerate(waiting, start=5):
        match kind:
            case "s":
                sent.append(await harness.step(model, seq_id))
            case _:
                sent.append(await harness.fb(model, seq_id, forward_only=kind == "f"))
    await harness.advance(331.0)
    for submitted in sent:
        assert "seq_id 4" in (await harness.error(submitted)).message
    np.testing.assert_array_equal(harness.weights(model), harness.weights(clean))
    at = 5 + len(waiting)
    command = forward_backward(model, at)
    await harness.result(await harness.train(command))
    answer = await harness.answer(await harness.step(model, at + 1))
    assert isinstance(answer, DescantError) != next_step_works
    if next_step_works:
        await harness.result(await harness.train(replace(command, model_id=clean, seq_id=3)))
        await harness.result(await harness.step(clean, 4))
    np.testing.assert_array_equal(harness.weights(model), harness.weights(clean))


async def test_a_gap_ends_with_its_session(harness: Harness) -> None:
    session = await harness.session()
    model = await harness.model(session)
    behind = await harness.fb(model, 2)
    await harness.service.finish_session("alice", session, reason="success", detail=None)
    error = await harness.error(behind)
    assert error.category == "user"
    assert "seq_id 1" in error.message


async def test_a_refused_request_takes_its_place(harness: Harness) -> None:
    model = await harness.model()
    await harness.result(await harness.fb(model, 1))
    step = await harness.step(model, 3)
    refused = await harness.service.training.refuse(
        "alice", model_id=model, seq_id=2, operation="forward_backward", message="data is empty", poisons_gradient=True
    )
    assert (await harness.error(refused)).message == "data is empty"
    assert "data is empty" in (await harness.error(step)).message
    await harness.result(await harness.fb(model, 4))
    await harness.result(await harness.step(model, 5))


async def test_what_is_refused_at_once_consumes_its_id(harness: Harness) -> None:
    model = await harness.model()
    with pytest.raises(UserError, match="name"):
        await harness.save(model, 1, "a/b")
    with pytest.raises(UserError, match="name"):
        await harness.sampler(model, 2, name="")
    with pytest.raises(UserError, match="ttl_seconds"):
        await harness.save(model, 3, "a", ttl=5)
    with pytest.raises(UserError, match="expected 1"):
        await harness.service.training.load_weights_into("alice", model_id=model, seq_id=4, path="tinker://x/weights/y", optimizer=False)  # fmt: skip  # noqa: E501
    with pytest.raises(UserError, match="sampling_session_seq_id"):
        await harness.sampler(model, 5)
    with pytest.raises(UserError, match="name"):
        await harness.save(model, 1, "a/b")
    await harness.result(await harness.fb(model, 6))
    assert [command.seq_id for command in harness.trainer.commands] == list(range(7))


async def test_refusals_and_saves_reach_the_trainer_in_order(harness: Harness) -> None:
    model = await harness.model()
    sent = [await harness.save(model, 3), await harness.fb(model, 1)]
    with pytest.raises(UserError):
        await harness.save(model, 2, "..")
    for submitted in sent:
        await harness.result(submitted)
    assert [type(command) for command in harness.trainer.commands[1:]] == [ForwardBackward, Rejected, Snapshot]


async def test_seq_id_zero_belongs_to_the_creation(harness: Harness) -> None:
    model = await harness.model()
    with pytest.raises(UserError, match="seq_id is 0"):
        await harness.fb(model, 0)


async def test_a_request_whose_answer_was_forgotten_is_not_run_again(harness: Harness) -> None:
    model = await harness.model()
    await harness.result(await harness.fb(model, 1))
    await harness.result(await harness.step(model, 2))
    before = harness.weights(model).copy()
    await harness.futures.prune(finished_before=harness.clock.now() + 1)
    error = await harness.error(await harness.step(model, 2))
    assert "no longer kept" in error.message
    np.testing.assert_array_equal(harness.weights(model), before)


MIB = 1 << 20


def large(model_id: str, seq_id: int, num_bytes: int) -> ForwardBackward:
    """A request whose arrays look into a body of this size."""
    command = forward_backward(model_id, seq_id)
    weights = np.frombuffer(bytes(num_bytes), np.float32)[:3]
    datum = replace(command.data[0], loss_fn_inputs={**command.data[0].loss_fn_inputs, "weights": weights})
    return replace(command, data=(datum,))


async def sent_until_full(
    harness: Harness, model_id: str, num_bytes: int, *, first: int = 1, last: int = 60, owner: str = "alice"
) -> tuple[list[Submitted], str]:
    """Requests of this size until one is told to come again, and what it is told."""
    taken: list[Submitted] = []
    for seq_id in range(first, last + 1):
        try:
            taken.append(await harness.train(large(model_id, seq_id, num_bytes), owner=owner))
        except Overloaded as error:
            return taken, error.message
    raise AssertionError("all were taken")


async def held_at(harness: Harness, max_bytes: int) -> asyncio.Event:
    """A server that takes so much; backwards run when the event is set."""
    harness.settings = replace(harness.settings, max_training_bytes=max_bytes)
    await harness.restart()
    release = asyncio.Event()

    async def hook(what: object) -> None:
        if isinstance(what, ForwardBackward):
            await release.wait()

    harness.hook = hook
    return release


async def test_one_owners_data_leaves_room_for_others_and_one_models_for_its_owners_others(harness: Harness) -> None:
    release = await held_at(harness, 64 * MIB)
    train = harness.train
    first, second, bobs = await harness.model(), await harness.model(), await harness.model(owner="bob")
    sent, told = await sent_until_full(harness, first, 2 * MIB)
    assert len(sent) == 10, "a third"
    assert "are more than your share of the 67108864 that it takes at a time" in told
    more, told = await sent_until_full(harness, second, 2 * MIB)
    assert 3 <= len(more) <= 6, "half, together"
    theirs, _ = await sent_until_full(harness, bobs, 2 * MIB, owner="bob")
    assert len(theirs) >= 5
    assert (await harness.service.stats())[BASE]["training_bytes"] <= 64 * MIB
    sent += more
    release.set()
    for submitted in sent:
        await harness.result(submitted)
    for submitted in theirs:
        await harness.result(submitted, owner="bob")
    assert (await harness.service.stats())[BASE]["training_bytes"] == 0
    again = await train(large(first, 11, 2 * MIB), owner="alice")
    await harness.result(again), "what was told to come again has kept its id"


async def test_what_waits_behind_a_gap_is_counted_and_the_missing_request_is_let_in(harness: Harness) -> None:
    release = await held_at(harness, 64 * MIB)
    train = harness.train
    model, other, bobs = await harness.model(), await harness.model(), await harness.model(owner="bob")
    waiting, told = await sent_until_full(harness, model, 5 * MIB, first=2, last=61)
    assert "would wait for an earlier one that has not arrived" in told
    for seq_id in range(5, 62):
        with pytest.raises(Overloaded):
            await train(large(model, seq_id, 5 * MIB), owner="alice")
    assert len(waiting) == 3, "a quarter"
    numbers = (await harness.service.stats())[BASE]
    assert 15 * MIB < numbers["training_waiting_bytes"] == numbers["training_bytes"] < 16 * MIB
    theirs = [await train(large(bobs, seq_id, 5 * MIB), owner="bob") for seq_id in (1, 2)]
    missing = await train(large(model, 1, 60 * MIB), owner="alice"), "it is let in, however large"
    for who, seq_id in ((model, 5), (other, 1)):
        with pytest.raises(Overloaded):
            await train(large(who, seq_id, 5 * MIB), owner="alice"), "but nothing else of its owner, while it runs"
    release.set()
    for submitted in (missing[0], *waiting):
        await harness.result(submitted)
    for submitted in theirs:
        await harness.result(submitted, owner="bob")
    await harness.result(await train(large(model, 5, 5 * MIB), owner="alice"))
    numbers = (await harness.service.stats())[BASE]
    assert numbers["training_waiting_bytes"] == numbers["training_bytes"] == 0


async def test_a_gap_that_closes_gives_its_room_back(harness: Harness) -> None:
    await held_at(harness, 64 * MIB)
    model = await harness.model()
    waiting = [await harness.train(large(model, n, 5 * MIB)) for n in (3, 4)]
    with pytest.raises(UserError, match="name"):
        await harness.save(model, 5, "a/b")
    await harness.advance(331.0)
    for submitted in waiting:
        assert "seq_id 1 did not arrive" in (await harness.error(submitted)).message
    assert (await harness.service.stats())[BASE]["training_bytes"] == 0
    assert harness.service._models._behind == {}


async def test_requests_without_data_are_counted_too(harness: Harness) -> None:
    await held_at(harness, MIB)
    model = await harness.model()
    for seq_id in range(2, 66):
        await harness.step(model, seq_id)
    with pytest.raises(Overloaded):
        await harness.step(model, 66)
    again = [await harness.step(model, 2) for _ in range(3)]
    assert len({submitted.request_id for submitted in again}) == 1, "what was let in can be sent again"


async def test_a_model_keeps_so_many_refusals_that_wait(harness: Harness) -> None:
    model = await harness.model()
    for seq_id in range(2, MAX_CONSUMED + 10):
        with pytest.raises(UserError, match="name"):
            await harness.save(model, seq_id, "a/b")
    assert harness.service._models.get(model).queue.num_waiting == MAX_CONSUMED
    await harness.result(await harness.fb(model, 1))


async def test_keys_of_different_owners_do_not_meet(harness: Harness) -> None:
    key = FutureKey(kind="train", scope="m", seq_id=1)
    one, _ = await harness.futures.put(key=key, owner="alice", base="b", operation="x")
    two, new = await harness.futures.put(key=key, owner="bob", base="b", operation="x")
    assert new
    assert one != two
