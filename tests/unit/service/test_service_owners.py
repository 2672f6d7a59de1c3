"""Another's id is an id that never was, on every method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from service_harness import BASE, Harness

from descant.errors import NotFound
from descant.types import Lora


async def _alices(harness: Harness) -> dict[str, str]:
    session = await harness.session()
    model = await harness.model(session)
    saved = await harness.result(await harness.save(model, 1))
    sampler = await harness.result(await harness.sampler(model, 2, number=0))
    return {
        "session": session,
        "model": model,
        "path": saved.path,
        "sampler": sampler.sampling_session_id,
        "request": (await harness.fb(model, 3)).request_id,
    }


NOBODYS = {
    "session": "0" * 32,
    "model": "0" * 32 + ":train:0",
    "path": "tinker://" + "0" * 32 + ":train:0/weights/a",
    "sampler": "0" * 32 + ":sample:0",
    "request": "1" * 32,
}

Call = Callable[[Harness, dict[str, str], str], Awaitable[object]]
CALLS: dict[str, Call] = {
    "heartbeat": lambda h, ids, _: h.service.heartbeat("bob", ids["session"]),
    "finish_session": lambda h, ids, _: h.service.finish_session("bob", ids["session"], reason="errored", detail=None),
    "create_model": lambda h, ids, _: h.create(ids["session"], owner="bob"),
    "get_info": lambda h, ids, _: h.service.training.get_info("bob", ids["model"]),
    "forward_backward": lambda h, ids, _: h.fb(ids["model"], 9, owner="bob"),
    "optim_step": lambda h, ids, _: h.step(ids["model"], 9, owner="bob"),
    "refuse": lambda h, ids, _: h.service.training.refuse(
        "bob", model_id=ids["model"], seq_id=9, operation="x", message="x", poisons_gradient=True
    ),
    "save_weights": lambda h, ids, _: h.save(ids["model"], 9, owner="bob"),
    "save_weights, malformed": lambda h, ids, _: h.save(ids["model"], 9, "a/b", owner="bob"),
    "load_weights_new, session": lambda h, ids, own: h.service.creation.load_weights_new(
        "bob", session_id=ids["session"], model_seq_id=0, path=ids["path"], optimizer=False, base_model=None,
        user_metadata=None,
    ),
    "load_weights_new, path": lambda h, ids, own: h.service.creation.load_weights_new(
        "bob", session_id=own, model_seq_id=0, path=ids["path"], optimizer=False, base_model=None, user_metadata=None
    ),
    "load_weights_into": lambda h, ids, _: h.service.training.load_weights_into(
        "bob", model_id=ids["model"], seq_id=1, path=ids["path"], optimizer=False
    ),
    "save_weights_for_sampler": lambda h, ids, _: h.sampler(ids["model"], 9, number=7, owner="bob"),
    "weights_info": lambda h, ids, _: h.service.training.weights_info("bob", ids["path"]),
    "create_sampling_session, session": lambda h, ids, _: h.service.sampling.create_sampling_session(
        "bob", session_id=ids["session"], sampling_session_seq_id=5, base_model=BASE, model_path=None
    ),
    "create_sampling_session, path": lambda h, ids, own: h.service.sampling.create_sampling_session(
        "bob", session_id=own, sampling_session_seq_id=5, base_model=None, model_path=ids["path"]
    ),
    "get_sampler": lambda h, ids, _: h.service.sampling.get_sampler("bob", ids["sampler"]),
    "sample": lambda h, ids, _: h.sample(ids["sampler"], 9, owner="bob"),
    "retrieve_future": lambda h, ids, _: h.service.futures.retrieve_future("bob", ids["request"], timeout_s=25.0),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_another_owners_id_is_as_unknown_as_nobodys(harness: Harness, call: Call) -> None:
    alices = await _alices(harness)
    own = await harness.session("bob")
    num_commands = len(harness.trainer.commands)
    messages = []
    for ids in (alices, NOBODYS):
        with pytest.raises(NotFound) as error:
            await call(harness, ids, own)
        message = error.value.message
        for what, id_ in ids.items():
            message = message.replace(id_, what)
        messages.append(message)
    assert messages[0] == messages[1]
    assert len(harness.trainer.commands) == num_commands
    await harness.result(await harness.step(alices["model"], 4)), "and nothing has happened to it"


async def test_a_path_of_anothers_does_not_tell_whether_it_exists_when_loaded_into_a_model(harness: Harness) -> None:
    alices = await _alices(harness)
    errors = []
    for path in (alices["path"], NOBODYS["path"]):
        model = await harness.model(owner="bob")
        sent = await harness.service.training.load_weights_into(
            "bob", model_id=model, seq_id=1, path=path, optimizer=False
        )
        errors.append((await harness.error(sent, owner="bob")).message.replace(path, "path"))
    assert errors[0] == errors[1]


async def test_ids_cannot_be_guessed(harness: Harness) -> None:
    ids = [await harness.session() for _ in range(8)]
    assert all(len(id_) == 32 for id_ in ids)
    assert len({id_[:8] for id_ in ids}) == 8


async def test_the_same_numbers_of_two_owners_are_two_models(harness: Harness) -> None:
    models = [await harness.model(owner=owner) for owner in ("alice", "bob")]
    for model, owner in zip(models, ("alice", "bob")):
        await harness.result(await harness.fb(model, 1, owner=owner), owner=owner)
        info = await harness.service.training.get_info(owner, model)
        assert info.user_metadata == {"who": owner}
        assert info.trainable == Lora(rank=2, seed=7)
