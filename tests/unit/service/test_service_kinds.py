"""Full models beside adapters: what is made, saved, loaded, sampled and counted of them, and where they are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from service_harness import BASE, Harness

from descant.errors import QuotaExceeded, UserError
from descant.service.futures import Submitted
from descant.service.quotas import model_bytes, version_bytes
from descant.types import Full, Lora, ModelCreated, Trainable


async def create(harness: Harness, trainable: Trainable, session: str | None = None, number: int = 0) -> Submitted:
    return await harness.service.creation.create_model(
        "alice",
        session_id=session or await harness.session(),
        model_seq_id=number,
        base_model=BASE,
        trainable=trainable,
        optimizer="adamw",
        user_metadata=None,
    )


async def trained(harness: Harness, trainable: Trainable, *, name: str | None = None) -> str:
    """After one step, seq_ids 1 and 2; saved as ``name`` by seq_id 3."""
    submitted = await create(harness, trainable)
    model = submitted.model_id
    assert model is not None
    assert await harness.result(submitted) == ModelCreated(model_id=model, trainable=trainable, step=0)
    await harness.result(await harness.fb(model, 1))
    await harness.result(await harness.step(model, 2))
    if name is not None:
        await harness.result(await harness.save(model, 3, name))
    return model


async def load_new(harness: Harness, path: str) -> Submitted:
    return await harness.service.creation.load_weights_new(
        "alice", session_id=await harness.session(), model_seq_id=0, path=path, optimizer=True, base_model=None,
        user_metadata=None,
    )  # fmt: skip


async def load_into(harness: Harness, model: str, path: str) -> Submitted:
    return await harness.service.training.load_weights_into(
        "alice", model_id=model, seq_id=1, path=path, optimizer=True
    )


async def sampler_of(harness: Harness, path: str) -> str:
    return await harness.service.sampling.create_sampling_session(
        "alice", session_id=await harness.session(), sampling_session_seq_id=0, base_model=None, model_path=path
    )


async def for_adapters_alone(harness: Harness) -> None:
    """A restart over the same files."""
    harness.trains = frozenset(("lora",))
    await harness.restart()


async def test_a_full_model_is_trained_saved_loaded_and_sampled(harness: Harness) -> None:
    model = await trained(harness, Full(), name="a")
    path = f"tinker://{model}/weights/a"
    assert harness.weights(model).any()
    training = harness.service.training
    assert (await training.get_info("alice", model)).trainable == Full()
    assert (await training.weights_info("alice", path)).trainable == Full()
    new = (await harness.result(await load_new(harness, path))).model_id
    into = (await create(harness, Full())).model_id
    assert into is not None
    await harness.result(await load_into(harness, into, path))
    for loaded in (new, into):
        assert (await training.get_info("alice", loaded)).trainable == Full()
        np.testing.assert_array_equal(harness.weights(loaded), harness.weights(model))
    unnamed = (await harness.result(await harness.sampler(model, 4, number=0))).sampling_session_id
    outputs = [await harness.greedy(sampler) for sampler in (unnamed, await sampler_of(harness, path))]
    for one, other in zip(outputs[0].sequences, outputs[1].sequences, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    await harness.restart()
    assert (await harness.service.training.get_info("alice", model)).trainable == Full(), "from the database"


async def test_weights_of_one_kind_are_not_loaded_into_a_model_of_the_other(harness: Harness) -> None:
    full, adapter = await trained(harness, Full(), name="a"), await trained(harness, Lora(rank=2), name="a")
    layers = "rank 2 with train_attn, train_mlp, train_unembed"
    for source, trainable, what, into in (
        (full, Lora(rank=2), "all of the base's weights", layers),
        (adapter, Full(), layers, "all of the base's weights"),
    ):
        model = (await create(harness, trainable)).model_id
        assert model is not None
        error = await harness.error(await load_into(harness, model, f"tinker://{source}/weights/a"))
        assert isinstance(error, UserError)
        assert error.message == f"tinker://{source}/weights/a has {what}, the model has {into}"
        assert not harness.weights(model).any()


async def test_a_kind_that_a_base_does_not_train_is_refused_before_anything_changes(harness: Harness) -> None:
    model = await trained(harness, Full(), name="a")
    path = f"tinker://{model}/weights/a"
    await for_adapters_alone(harness)
    harness.quotas = replace(harness.quotas, models=1)
    session = await harness.session()
    with pytest.raises(
        UserError, match="the model to create is of kind 'full', expected 'lora': fake/bigram trains no"
    ):
        await create(harness, Full(), session)
    with pytest.raises(UserError, match=f"{path} is of kind 'full', expected 'lora': fake/bigram trains no other"):
        await load_new(harness, path)
    with pytest.raises(UserError, match=f"{path} is of kind 'full', expected 'lora': fake/bigram samples no other"):
        await sampler_of(harness, path)
    assert not harness.trainer.commands
    await harness.result(await create(harness, Lora(rank=2), session))
    assert (await harness.service.training.get_info("alice", model)).trainable == Full(), "it is lost, and known"


async def test_a_kind_that_an_engine_does_not_sample_is_saved_by_name_alone(harness: Harness) -> None:
    harness.samples = frozenset(("lora",))
    await harness.restart()
    model = await trained(harness, Full())
    with pytest.raises(UserError, match=f"model '{model}' is of kind 'full', expected 'lora': fake/bigram samples no"):
        await harness.sampler(model, 3, number=0)
    await harness.result(await harness.sampler(model, 4, name="kept")), "its seq_id was consumed"


async def test_a_full_model_counts_as_the_numbers_of_its_base(harness: Harness) -> None:
    facts = harness.world.facts
    size = model_bytes(facts, Full())
    assert size == facts.num_params * 16
    assert version_bytes(facts, Full()) == facts.num_params * np.dtype(facts.dtype).itemsize
    adapter = model_bytes(facts, Lora(rank=2))
    harness.quotas = replace(harness.quotas, model_bytes=size + adapter - 1)
    await harness.restart()
    session = await harness.session()
    await harness.result(await create(harness, Full(), session, 0))
    with pytest.raises(QuotaExceeded, match=f"this model would take {size} bytes beside the {size} of your others"):
        await create(harness, Full(), session, 1)
    with pytest.raises(QuotaExceeded, match=f"this model would take {adapter} bytes beside the {size} of your others"):
        await create(harness, Lora(rank=2), session, 2)
