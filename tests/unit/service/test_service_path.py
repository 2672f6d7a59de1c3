from __future__ import annotations

from service_harness import Harness

from descant.types import ModelCreated, SampleOutput, SamplerWeightsSaved, WeightsLoaded, WeightsSaved


async def test_train_save_sample_load(harness: Harness) -> None:
    session = await harness.session()
    submitted = await harness.create(session)
    assert submitted.model_id == f"{session}:train:0"
    assert isinstance(await harness.result(submitted), ModelCreated)
    model = f"{session}:train:0"
    first = await harness.result(await harness.fb(model, 1))
    await harness.result(await harness.step(model, 2))
    assert await harness.result(await harness.save(model, 3, "mid")) == WeightsSaved(
        path=f"tinker://{model}/weights/mid"
    )
    named = await harness.result(await harness.sampler(model, 4, name="mid"))
    assert named == SamplerWeightsSaved(path=f"tinker://{model}/sampler_weights/mid", sampling_session_id=None)
    ephemeral = await harness.result(await harness.sampler(model, 5, number=0))
    assert ephemeral == SamplerWeightsSaved(path=None, sampling_session_id=f"{session}:sample:0")
    second = await harness.result(await harness.fb(model, 6, forward_only=True))
    assert first.metrics["loss:sum"] > 0
    assert second.metrics["loss:sum"] > 0

    path_sampler = await harness.service.sampling.create_sampling_session(
        "alice", session_id=session, sampling_session_seq_id=1, base_model=None, model_path=named.path
    )
    one, two = await harness.greedy(path_sampler), await harness.greedy(f"{session}:sample:0")
    assert isinstance(one, SampleOutput)
    assert list(one.sequences[0].tokens) == list(two.sequences[0].tokens)
    assert {v.number for v in one.versions} == {4}
    assert {v.number for v in two.versions} == {5}

    loaded = await harness.service.creation.load_weights_new(
        "alice", session_id=session, model_seq_id=1, path=f"tinker://{model}/weights/mid", optimizer=True,
        base_model=None, user_metadata=None,
    )  # fmt: skip
    assert loaded.model_id == f"{session}:train:1"
    answer = await harness.result(loaded)
    assert answer == WeightsLoaded(path=f"tinker://{model}/weights/mid", model_id=loaded.model_id)
