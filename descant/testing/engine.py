"""Conformance of ``Engine``: what every implementation must do, the fake included.

    class TestMine(EngineSuite):
        @pytest.fixture
        async def backend(self): ...       # a ``Backend`` whose engine has room for at most 8 requests at once

The backend's trainer makes the versions; an engine that does not share its rows gets them through a ``WeightSource``.
Log-probabilities are compared to 1e-3.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from descant.errors import DescantError, NotFound, Overloaded, UserError
from descant.ports import Engine
from descant.service.backends import Backend
from descant.testing.trainer import DEADLINE_S, LORA, Model, datum, output, result, saved, text, without_files
from descant.types import (
    EMPTY_TOPK,
    DeleteModel,
    Full,
    PromptScores,
    SampleDelta,
    SampleRequest,
    SamplingParams,
    SnapshotRef,
    TensorData,
    Trainable,
    Version,
)

PROMPT = text(1, 2, 3)
TOLERANCE = 1e-3


@dataclass
class Sampled:
    """A request's deltas, folded by sample."""

    deltas: list[SampleDelta] = field(default_factory=list)

    def of(self, sample: int) -> list[SampleDelta]:
        return [delta for delta in self.deltas if delta.sample == sample]

    def tokens(self, sample: int = 0) -> list[int]:
        return [int(token) for delta in self.of(sample) for token in delta.tokens]

    def logprobs(self, sample: int = 0) -> list[float]:
        return [float(logprob) for delta in self.of(sample) for logprob in delta.logprobs]

    def ends(self, sample: int = 0) -> list[str]:
        return [delta.stop_reason for delta in self.of(sample) if delta.stop_reason is not None]

    @property
    def prompt_logprobs(self) -> list[float]:
        return [] if self.scores.logprobs is None else [float(x) for x in self.scores.logprobs]

    @property
    def scores(self) -> PromptScores:
        return next((delta.prompt for delta in self.deltas if delta.prompt is not None), PromptScores())

    def topk(self, sample: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probabilities of the likeliest tokens at each sampled one."""
        parts = [delta.topk_logprobs for delta in self.of(sample) if delta.topk_logprobs is not None]
        return np.concatenate([p.token_ids for p in parts]), np.concatenate([p.logprobs for p in parts])


_num_requests = 0


def request(version: Version | None = None, *, num_samples: int = 1, **fields: Any) -> SampleRequest:
    """Fields of ``SamplingParams`` and of ``SampleRequest`` alike; by default 4 tokens that nothing stops."""
    global _num_requests
    _num_requests += 1
    names = {item.name for item in dataclasses.fields(SampleRequest)} - {"version", "num_samples", "sampling_params"}
    of_request = names & fields.keys()
    mine = {name: fields.pop(name) for name in of_request}
    params = SamplingParams(**{"max_tokens": 4, "seed": 0, "stop": (), **fields})
    return SampleRequest(
        **{
            "request_id": f"request-{_num_requests}",
            "version": version,
            "prompt": PROMPT,
            "num_samples": num_samples,
            "sampling_params": params,
            **mine,
        }
    )


def targets(shape: tuple[int, int], *tokens: int) -> TensorData:
    return TensorData(data=np.array(tokens, np.int64), shape=shape)


async def sampled(engine: Engine, wanted: SampleRequest) -> Sampled:
    async def fold() -> Sampled:
        return Sampled([delta async for delta in engine.sample(wanted)])

    return await asyncio.wait_for(fold(), DEADLINE_S)


async def fails(engine: Engine, wanted: SampleRequest, kind: type[DescantError]) -> str:
    with pytest.raises(kind) as caught:
        await sampled(engine, wanted)
    return str(caught.value)


async def trained(backend: Backend, model_id: str = "model", *, steps: int = 3, trainable: Trainable = LORA) -> Model:
    model = Model(backend.trainer, model_id)
    await result(model.create(trainable))
    await model.train(steps)
    return model


async def frozen(model: Model, *, for_disk: bool = True) -> SnapshotRef:
    return cast(SnapshotRef, await result(model.snapshot("sampler", for_disk=for_disk)))


async def ephemeral(backend: Backend, model: Model) -> SnapshotRef:
    """For ``backend.engine`` alone, as the service takes one: without bytes, where the engine shares rows."""
    return await frozen(model, for_disk=not backend.engine.capabilities.shares_rows)


def near(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        math.isclose(a, b, abs_tol=TOLERANCE) or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other)
    )


class EngineSuite:
    # ------------------------------------------------------------------------------------------------ sampling
    async def test_is_an_engine(self, backend: Backend, tmp_path: Path) -> None:
        assert isinstance(backend.engine, Engine)
        assert backend.engine.capabilities.max_num_samples >= 1

    async def test_every_sample_ends_once(self, backend: Backend, tmp_path: Path) -> None:
        wanted = request(num_samples=3, temperature=1.0)
        got = await sampled(backend.engine, wanted)
        assert {delta.request_id for delta in got.deltas} == {wanted.request_id}
        assert len(got.deltas) == 3, "not streaming: one delta a sample"
        for sample in range(3):
            assert got.ends(sample) == ["length"]
            assert len(got.tokens(sample)) == len(got.logprobs(sample)) == 4
            assert all(0 <= token < backend.facts.vocab_size for token in got.tokens(sample))
            assert all(logprob <= 0 for logprob in got.logprobs(sample))
            assert got.of(sample)[0].version is None

    async def test_streaming_is_the_same_in_pieces(self, backend: Backend, tmp_path: Path) -> None:
        whole = await sampled(backend.engine, request(num_samples=2, seed=7, max_tokens=6))
        pieces = await sampled(backend.engine, request(num_samples=2, seed=7, max_tokens=6, stream=True))
        for sample in range(2):
            assert len(pieces.of(sample)) > 1
            assert pieces.ends(sample) == ["length"]
            assert pieces.of(sample)[-1].stop_reason == "length"
            assert pieces.tokens(sample) == whole.tokens(sample)
            assert near(pieces.logprobs(sample), whole.logprobs(sample))

    async def test_a_seed_fixes_the_samples_and_zero_is_one(self, backend: Backend, tmp_path: Path) -> None:
        outputs = [
            (await sampled(backend.engine, request(num_samples=2, seed=seed, max_tokens=8))) for seed in (0, 0, 1)
        ]
        assert outputs[0].tokens(0) == outputs[1].tokens(0)
        assert outputs[0].tokens(0) != outputs[2].tokens(0)
        assert outputs[0].tokens(0) != outputs[0].tokens(1), "samples of one request must differ"
        unseeded = [await sampled(backend.engine, request(seed=None, max_tokens=8)) for _ in range(2)]
        assert unseeded[0].tokens() != unseeded[1].tokens()

    async def test_temperature_zero_is_greedy(self, backend: Backend, tmp_path: Path) -> None:
        greedy = await sampled(backend.engine, request(temperature=0.0, seed=1))
        assert greedy.tokens() == (await sampled(backend.engine, request(temperature=0.0, seed=2))).tokens()
        assert greedy.tokens() == (await sampled(backend.engine, request(top_k=1, seed=3))).tokens()
        assert greedy.tokens() == (await sampled(backend.engine, request(top_p=1e-6, seed=4))).tokens()

    async def test_stop_in_all_its_forms(self, backend: Backend, tmp_path: Path) -> None:
        free = await sampled(backend.engine, request(temperature=0.0, max_tokens=6))
        stopper = free.tokens()[2]
        first = free.tokens().index(stopper) + 1
        stopped = await sampled(backend.engine, request(temperature=0.0, max_tokens=6, stop=(stopper,)))
        assert stopped.tokens() == free.tokens()[:first], "the stop is part of the tokens, once"
        assert stopped.ends() == ["stop"]
        assert free.ends() == ["length"]

    async def test_max_tokens_none_fills_the_context(self, backend: Backend, tmp_path: Path) -> None:
        long = text(*[1 + i % 5 for i in range(backend.facts.max_context_length - 5)])
        got = await sampled(backend.engine, request(prompt=long, max_tokens=None))
        assert len(got.tokens()) == 5
        assert got.ends() == ["length"]

    async def test_a_prompt_may_fill_the_context(self, backend: Backend, tmp_path: Path) -> None:
        """Its scores are asked for with one token, which needs no position of its own; there is no second one."""
        length = backend.facts.max_context_length
        prompt = text(*[1 + i % 5 for i in range(length)])
        for max_tokens in (1, None):
            got = await sampled(backend.engine, request(prompt=prompt, max_tokens=max_tokens, prompt_logprobs=True))
            assert len(got.tokens()) == 1
            assert got.ends() == ["length"]
            assert len(got.prompt_logprobs) == length
            assert all(score < 0 for score in got.prompt_logprobs[1:])
        shorter = text(*[1 + i % 5 for i in range(length - 1)])
        fewer = await sampled(backend.engine, request(prompt=shorter, max_tokens=1, prompt_logprobs=True))
        assert near(got.prompt_logprobs[:-1], fewer.prompt_logprobs)
        assert "max_tokens" in await fails(backend.engine, request(prompt=prompt, max_tokens=2), UserError)
        longer = text(*[1 + i % 5 for i in range(length + 1)])
        assert "prompt" in await fails(backend.engine, request(prompt=longer, max_tokens=1), UserError)

    async def test_logprobs_are_of_the_scaled_distribution(self, backend: Backend, tmp_path: Path) -> None:
        """The sum over all tokens of a one-token sample's probability, sampled often enough to have seen the likely
        ones: exp(logprob) of one token is the same whenever it is sampled, and sums to at most 1."""
        seen: dict[int, float] = {}
        for seed in range(3):
            got = await sampled(backend.engine, request(num_samples=40, seed=seed, max_tokens=1, temperature=0.5))
            for sample in range(40):
                token, logprob = got.tokens(sample)[0], got.logprobs(sample)[0]
                assert math.isclose(seen.setdefault(token, logprob), logprob, abs_tol=TOLERANCE)
        assert sum(map(math.exp, seen.values())) <= 1 + TOLERANCE
        cut = await sampled(backend.engine, request(num_samples=40, max_tokens=1, temperature=0.5, top_k=2))
        for sample in range(40):
            if cut.tokens(sample)[0] in seen:  # before top-k and top-p cut it
                assert math.isclose(seen[cut.tokens(sample)[0]], cut.logprobs(sample)[0], abs_tol=TOLERANCE)

    async def test_a_prompt_that_comes_again_is_not_computed_again(self, backend: Backend, tmp_path: Path) -> None:
        """With the same weights; and the first delta says so."""
        engine, model = backend.engine, await trained(backend)
        old, new = await ephemeral(backend, model), await ephemeral(backend, model)
        for ref in (old, new):
            await engine.publish(ref)
        long = [1 + i % 5 for i in range(backend.facts.max_context_length - 5)]

        async def hits(version: Version, *prompt: int, **fields: Any) -> list[int]:
            got = await sampled(engine, request(version, prompt=text(*prompt), max_tokens=2, **fields))
            return [delta.prompt_cache_hit_tokens for delta in got.deltas]

        assert await hits(old.version, *long, num_samples=2) == [0, 0], "samples of one request do not count"
        first, *rest = await hits(old.version, *long, num_samples=2, stream=True)
        assert 0 < first < len(long)
        assert rest == [0] * 3
        assert await hits(new.version, *long) == [0]
        assert await hits(new.version, 6, *long) == [0]

    async def test_a_prompt_is_kept_for_its_own_scope_alone(self, backend: Backend, tmp_path: Path) -> None:
        engine, model = backend.engine, await trained(backend)
        ref = await ephemeral(backend, model)
        await engine.publish(ref)
        long = text(*[1 + i % 5 for i in range(backend.facts.max_context_length - 5)])
        for version in (None, ref.version):
            found = []
            for scope in ("alice", "bob", "alice", "bob"):
                wanted = request(version, prompt=long, max_tokens=2, owner=scope, prefix_scope=scope)
                found.append((await sampled(engine, wanted)).deltas[0].prompt_cache_hit_tokens > 0)
            assert found == [False, False, True, True]

    # ------------------------------------------------------------------------------------------------ scores
    async def test_prompt_scores_come_once(self, backend: Backend, tmp_path: Path) -> None:
        got = await sampled(
            backend.engine, request(num_samples=2, prompt_logprobs=True, topk_prompt_logprobs=3, stream=True)
        )
        carriers = [delta for delta in got.deltas if delta.prompt is not None]
        assert len(carriers) == 1
        scores = carriers[0].prompt
        assert scores is not None
        assert scores.topk is not None
        assert scores.logprobs is not None
        assert scores.logprobs.shape == (3,)
        assert np.isnan(scores.logprobs[0])
        assert (scores.logprobs[1:] <= 0).all()
        assert scores.topk.token_ids.shape == scores.topk.logprobs.shape == (3, 3)
        assert (scores.topk.token_ids[0] == 0).all()
        assert (scores.topk.logprobs[0] == -99999.0).all()
        assert (np.diff(scores.topk.logprobs[1:], axis=1) <= 0).all()
        assert (await sampled(backend.engine, request())).prompt_logprobs == []

    async def test_only_the_last_of_a_prompt(self, backend: Backend, tmp_path: Path) -> None:
        fields: dict[str, Any] = {"prompt": text(1, 2, 3, 4), "prompt_logprobs": True, "topk_prompt_logprobs": 2}
        whole = (await sampled(backend.engine, request(**fields))).scores
        last = (await sampled(backend.engine, request(prompt_logprobs_last_n=2, **fields))).scores
        assert whole.logprobs is not None
        assert last.logprobs is not None
        assert whole.topk is not None
        assert last.topk is not None
        assert np.isnan(whole.logprobs).tolist() == [True, False, False, False]
        assert np.isnan(last.logprobs).tolist() == [True, True, False, False]
        assert near(last.logprobs[2:].tolist(), whole.logprobs[2:].tolist())
        assert (last.topk.logprobs[:2] == EMPTY_TOPK[1]).all()
        assert (last.topk.token_ids[2:] == whole.topk.token_ids[2:]).all()

    @pytest.mark.parametrize("sparse", [False, True])
    async def test_chosen_tokens_at_a_prompts_positions(self, backend: Backend, tmp_path: Path, sparse: bool) -> None:
        """Each token is scored as it is when it stands there itself; nothing is said of cells that name none."""
        wanted = TensorData(data=np.array([-1, 4, 3, -1, 5, 4], np.int64), shape=(2, 3))
        if sparse:
            wanted = TensorData(
                data=np.array([4, 3, 5, 4], np.int64),
                shape=(2, 3),
                sparse_crow_indices=np.array([0, 2, 4], np.int64),
                sparse_col_indices=np.array([1, 2, 1, 2], np.int64),
            )
        scores = (await sampled(backend.engine, request(target_prompt_logprobs=wanted))).scores
        assert scores.logprobs is scores.topk is None, "not asked for"
        got = scores.target_logprobs
        assert got is not None
        assert got.shape == (2, 3)
        assert got.data.dtype == np.float32
        assert (got.sparse_crow_indices is None) != sparse
        expected = [0.0] * len(wanted.data)
        for row in range(2):
            for cell in range(*wanted.row_starts()[row : row + 2]):
                if (token := int(wanted.data[cell])) >= 0:
                    prompt = text(*[1, 2, 3][: row + 1], token)
                    alone = await sampled(backend.engine, request(prompt=prompt, prompt_logprobs=True))
                    expected[cell] = alone.prompt_logprobs[-1]
        assert near(got.data.tolist(), expected)

    async def test_tokens_drawn_at_a_prompts_positions(self, backend: Backend, tmp_path: Path) -> None:
        """At the request's temperature, with what each is worth at temperature 1."""
        for temperature in (1.0, 0.3, 0.0):
            fields: dict[str, Any] = {"temperature": temperature, "prompt_alt_tokens_k": 20, "topk_prompt_logprobs": 1}
            scores = (await sampled(backend.engine, request(**fields))).scores
            again = (await sampled(backend.engine, request(**fields))).scores
            assert scores.topk is not None
            assert scores.alt_tokens is not None
            assert again.alt_tokens is not None
            tokens, logprobs = scores.alt_tokens.tokens, scores.alt_tokens.logprobs
            assert tokens.shape == logprobs.shape == (2, 20)
            assert (tokens.dtype, logprobs.dtype) == (np.int64, np.float32)
            assert (again.alt_tokens.tokens == tokens).all(), "a seed fixes them"
            if temperature == 0:
                assert (tokens == scores.topk.token_ids[1:]).all()
            else:
                assert len(set(tokens[0].tolist())) > 1
            wanted = TensorData(data=tokens.ravel(), shape=(2, 20))
            worth = (await sampled(backend.engine, request(target_prompt_logprobs=wanted))).scores.target_logprobs
            assert worth is not None
            assert near(logprobs.ravel().tolist(), worth.data.tolist())

    async def test_the_likeliest_at_each_sampled_token(self, backend: Backend, tmp_path: Path) -> None:
        fields: dict[str, Any] = {"num_samples": 2, "temperature": 0.5, "topk_sample_logprobs": 3, "max_tokens": 6}
        whole = await sampled(backend.engine, request(**fields))
        pieces = await sampled(backend.engine, request(stream=True, **fields))
        greedy = await sampled(backend.engine, request(**fields | {"temperature": 0.0, "num_samples": 1}))
        assert (greedy.topk()[0][:, 0] == greedy.tokens()).all()
        assert near(greedy.topk()[1][:, 0].tolist(), greedy.logprobs())
        for sample in range(2):
            ids, logprobs = whole.topk(sample)
            assert ids.shape == logprobs.shape == (6, 3)
            assert (np.diff(logprobs, axis=1) <= 0).all()
            assert (ids == pieces.topk(sample)[0]).all()
            for token, logprob, row, values in zip(
                whole.tokens(sample), whole.logprobs(sample), ids, logprobs, strict=True
            ):
                if token in row:  # of the same, scaled distribution
                    assert math.isclose(values[list(row).index(token)], logprob, abs_tol=TOLERANCE)
                else:
                    assert logprob <= values[-1] + TOLERANCE
        assert all(d.topk_logprobs is None for d in (await sampled(backend.engine, request())).deltas), "not asked for"

    async def test_the_sampler_scores_as_the_trainer_does(self, backend: Backend, tmp_path: Path) -> None:
        await self._scores_as_the_trainer(backend, await trained(backend))

    @staticmethod
    async def _scores_as_the_trainer(backend: Backend, model: Model) -> None:
        ref = await ephemeral(backend, model)
        await backend.engine.publish(ref)
        got = await sampled(backend.engine, request(ref.version, prompt_logprobs=True, max_tokens=5))
        everything = [1, 2, 3, *got.tokens()]
        item = datum(everything[:-1], everything[1:])
        logprobs = [float(x) for x in (await output(model.forward((item,)))).loss_fn_outputs[0]["logprobs"]]
        assert near(got.prompt_logprobs[1:], logprobs[:2])
        assert near(got.logprobs(), logprobs[2:])

    # ------------------------------------------------------------------------------------------------ versions
    @pytest.mark.parametrize("for_disk", [True, False])
    async def test_a_version_is_served_from_publish_to_release(
        self, backend: Backend, tmp_path: Path, for_disk: bool
    ) -> None:
        engine = backend.engine
        model = await trained(backend)
        ref = await frozen(model) if for_disk else await ephemeral(backend, model)
        await fails(engine, request(ref.version), NotFound)
        await engine.publish(ref)
        await engine.publish(ref)
        got = await sampled(engine, request(ref.version))
        assert {delta.version for delta in got.deltas} == {ref.version}
        await backend.trainer.drop(ref)
        await sampled(engine, request(ref.version))
        await engine.release(ref.version)
        await engine.release(ref.version)
        await fails(engine, request(ref.version), NotFound)
        await engine.release(Version(model_id="never", number=1))

    async def test_a_version_that_nobody_took(self, backend: Backend, tmp_path: Path) -> None:
        ref = await frozen(await trained(backend))
        with pytest.raises(NotFound):
            await backend.engine.publish(replace(ref, version=Version(model_id="model", number=99)))
        await fails(backend.engine, request(Version(model_id="model", number=99)), NotFound)

    async def test_a_version_does_not_change_while_training_goes_on(self, backend: Backend, tmp_path: Path) -> None:
        model, engine = await trained(backend), backend.engine
        ref = await ephemeral(backend, model)
        await model.train(1)  # between the snapshot and its publication, too
        await engine.publish(ref)
        before = await sampled(engine, request(ref.version, prompt_logprobs=True))
        await model.train(3)
        newer = await frozen(model)
        await engine.publish(newer)
        after = await sampled(engine, request(ref.version, prompt_logprobs=True))
        moved = await sampled(engine, request(newer.version, prompt_logprobs=True))
        base = await sampled(engine, request(None, prompt_logprobs=True))
        assert after.tokens() == before.tokens()
        assert near(after.prompt_logprobs, before.prompt_logprobs)
        assert not near(moved.prompt_logprobs, before.prompt_logprobs)
        assert not near(base.prompt_logprobs, before.prompt_logprobs)

    async def test_a_version_outlives_its_model(self, backend: Backend, tmp_path: Path) -> None:
        model = await trained(backend)
        ref = await ephemeral(backend, model)
        await backend.engine.publish(ref)
        before = await sampled(backend.engine, request(ref.version, prompt_logprobs=True))
        await result(model.send(DeleteModel))
        after = await sampled(backend.engine, request(ref.version, prompt_logprobs=True))
        assert near(after.prompt_logprobs, before.prompt_logprobs)

    async def test_a_version_from_a_checkpoint_is_the_one_that_was_saved(
        self, backend: Backend, tmp_path: Path
    ) -> None:
        model, engine = await trained(backend), backend.engine
        ref = await frozen(model)
        source = await saved(backend.trainer, ref, tmp_path / "a")
        await engine.publish(ref)
        live = await sampled(engine, request(ref.version, prompt_logprobs=True))
        await engine.release(ref.version)
        await backend.trainer.drop(ref)
        await engine.publish(replace(ref, directory=source.directory))
        read = await sampled(engine, request(ref.version, prompt_logprobs=True))
        assert near(read.prompt_logprobs, live.prompt_logprobs)
        assert read.tokens() == live.tokens()
        gone = replace(ref, version=Version(model_id="x", number=1), directory=str(tmp_path / "none"))

        async def use() -> None:  # read now, or at first use
            await engine.publish(gone)
            await sampled(engine, request(gone.version))

        with pytest.raises(NotFound):
            await use()

    async def test_a_full_model_is_sampled_or_refused_as_the_capabilities_say(
        self, backend: Backend, tmp_path: Path
    ) -> None:
        engine = backend.engine
        if Full.kind in backend.facts.trains & engine.capabilities.samples:
            await self._scores_as_the_trainer(backend, await trained(backend, trainable=Full()))
            return
        ref = SnapshotRef(
            version=Version(model_id="full", number=1),
            kind="sampler",
            trainable=Full(),
            step=1,
            applied_seq_id=1,
            has_pending_gradient=False,
            directory=without_files(Full(), tmp_path / "full").directory,
        )
        with pytest.raises(UserError, match=repr(Full.kind)):
            await engine.publish(ref)
        await fails(engine, request(ref.version), NotFound)

    async def test_a_release_leaves_running_requests_alone(self, backend: Backend, tmp_path: Path) -> None:
        engine = backend.engine
        ref = await ephemeral(backend, await trained(backend))
        await engine.publish(ref)
        undisturbed = await sampled(engine, request(ref.version, max_tokens=10))
        got = Sampled()
        async for delta in engine.sample(request(ref.version, max_tokens=10, stream=True)):
            if not got.deltas:
                await engine.release(ref.version)
            got.deltas.append(delta)
        assert got.tokens() == undisturbed.tokens()
        assert near(got.logprobs(), undisturbed.logprobs())

    # ------------------------------------------------------------------------------------------------ inflight
    async def test_inflight_goes_on_with_newer_weights(self, backend: Backend, tmp_path: Path) -> None:
        """Its deltas say since when; a snapshot's request beside it does not notice, nor does another model's."""
        engine, model = backend.engine, await trained(backend)
        old = await ephemeral(backend, model)
        await engine.publish(old)
        other = await ephemeral(backend, await trained(backend, "other"))
        await engine.publish(other)
        length = backend.facts.max_context_length - 3
        fixed = await sampled(engine, request(old.version, max_tokens=length, temperature=0.0))
        await model.train(20, (datum([1, 2, 3, *fixed.tokens()[:8]]),))
        new = await ephemeral(backend, model)

        async def watch(version: Version) -> Sampled:
            got = Sampled()
            wanted = request(version, max_tokens=length, temperature=0.0, stream=True, inflight=True)
            async for delta in engine.sample(wanted):
                got.deltas.append(delta)
                if len(got.deltas) == 3 and version == old.version:
                    await engine.publish(new)
                    await engine.release(old.version)
            return got

        beside = asyncio.ensure_future(sampled(engine, request(old.version, max_tokens=length, temperature=0.0)))
        moved, unmoved = await asyncio.wait_for(asyncio.gather(watch(old.version), watch(other.version)), DEADLINE_S)
        assert {delta.version for delta in unmoved.deltas} == {other.version}
        versions = [delta.version for delta in moved.deltas for _ in delta.tokens]
        assert len(versions) == length
        assert versions == sorted(versions, key=lambda v: v.number if v is not None else -1)
        assert set(versions) == {old.version, new.version}
        crossed = versions.index(new.version)
        assert crossed >= 3
        assert moved.tokens()[:crossed] == fixed.tokens()[:crossed]
        assert not near(moved.logprobs(), fixed.logprobs()), "nothing changed with the weights"
        assert (await beside).tokens() == fixed.tokens()
        assert {delta.version for delta in (await beside).deltas} == {old.version}

    async def test_inflight_in_one_piece_has_a_delta_for_each_weights(self, backend: Backend, tmp_path: Path) -> None:
        engine, model = backend.engine, await trained(backend)
        old = await ephemeral(backend, model)
        await engine.publish(old)
        await model.train(1)
        new = await ephemeral(backend, model)
        context = backend.facts.max_context_length - 3
        whole = asyncio.ensure_future(sampled(engine, request(old.version, max_tokens=context, inflight=True)))
        async for _ in engine.sample(request(old.version, max_tokens=2, stream=True)):
            pass  # of the same version, so that it runs where the other does, which has begun then
        await engine.publish(new)
        got = await whole
        assert len(got.tokens()) == context
        assert got.ends() == ["length"]
        assert [delta.version for delta in got.deltas] == [old.version, new.version]

    async def test_inflight_begins_with_the_newest(self, backend: Backend, tmp_path: Path) -> None:
        engine, model = backend.engine, await trained(backend)
        refs = []
        for _ in range(2):
            refs.append(await ephemeral(backend, model))
            await engine.publish(refs[-1])
            await model.train(1)
        old, new = refs
        got = await sampled(engine, request(old.version, inflight=True))
        assert {delta.version for delta in got.deltas} == {new.version}
        assert {delta.version for delta in (await sampled(engine, request(old.version))).deltas} == {old.version}
        assert {delta.version for delta in (await sampled(engine, request(inflight=True))).deltas} == {None}

    # ------------------------------------------------------------------------------------------------ the end of it
    async def test_cancel_ends_a_request_alone(self, backend: Backend, tmp_path: Path) -> None:
        engine = backend.engine
        wanted = request(max_tokens=None, stream=True)
        undisturbed = asyncio.ensure_future(sampled(engine, request(seed=5, max_tokens=12)))
        got = Sampled()

        async def consume() -> None:
            async for delta in engine.sample(wanted):
                if not got.deltas:
                    await engine.cancel(wanted.request_id)
                got.deltas.append(delta)

        await asyncio.wait_for(consume(), DEADLINE_S)
        assert got.ends() == []
        assert len(got.tokens()) < backend.facts.max_context_length - 3
        assert len((await undisturbed).tokens()) == 12
        await engine.cancel("never seen")

    async def test_closing_the_iterator_cancels(self, backend: Backend, tmp_path: Path) -> None:
        """As often as there is room, and once more: a request that was not cancelled would be in the way."""
        for _ in range(10):
            deltas = backend.engine.sample(request(max_tokens=12, stream=True))
            assert (await anext(aiter(deltas))).sample == 0
            await cast(Any, deltas).aclose()
        assert len((await sampled(backend.engine, request())).tokens()) == 4

    async def test_a_full_queue_says_so_and_the_others_end(self, backend: Backend, tmp_path: Path) -> None:
        outcomes = await asyncio.gather(
            *(sampled(backend.engine, request(seed=i)) for i in range(40)), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert refused
        assert all(isinstance(outcome, Overloaded) for outcome in refused)
        assert all(len(outcome.tokens()) == 4 for outcome in outcomes if isinstance(outcome, Sampled))
        assert len((await sampled(backend.engine, request())).tokens()) == 4

    async def test_a_queue_that_one_owner_has_filled_has_room_for_another(
        self, backend: Backend, tmp_path: Path
    ) -> None:
        flood = [
            asyncio.ensure_future(sampled(backend.engine, request(seed=i, max_tokens=12, owner="heavy")))
            for i in range(40)
        ]
        await asyncio.sleep(0)
        assert len((await sampled(backend.engine, request(owner="light"))).tokens()) == 4
        outcomes = await asyncio.gather(*flood, return_exceptions=True)
        assert any(isinstance(outcome, Overloaded) for outcome in outcomes), "there was no flood"

    # ------------------------------------------------------------------------------------------------ bad input
    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 10**6}, "max_tokens"),
            ({"temperature": -1.0}, "temperature"),
            ({"temperature": math.nan}, "temperature"),
            ({"top_p": 0.0}, "top_p"),
            ({"top_p": 1.5}, "top_p"),
            ({"top_k": 0}, "top_k"),
            ({"prompt": ()}, "prompt"),
            ({"prompt": text(1, 10**6)}, "prompt"),
            ({"prompt": text(1, -1)}, "prompt"),
            ({"num_samples": 0}, "num_samples"),
            ({"topk_prompt_logprobs": 10**4}, "topk_prompt_logprobs"),
            ({"topk_sample_logprobs": 10**4}, "topk_sample_logprobs"),
            ({"prompt_alt_tokens_k": 10**4}, "prompt_alt_tokens_k"),
            ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
            ({"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, "prompt_logprobs_last_n"),
            ({"target_prompt_logprobs": targets((1, 1), 4)}, "target_prompt_logprobs"),
            ({"target_prompt_logprobs": targets((2, 1), 4, 10**6)}, "target_prompt_logprobs"),
            ({"target_prompt_logprobs": targets((2, 1), -1, -1)}, "target_prompt_logprobs"),
        ],
    )
    async def test_bad_input_is_refused_by_name(
        self, backend: Backend, tmp_path: Path, fields: dict[str, Any], named: str
    ) -> None:
        assert named in await fails(backend.engine, request(**fields), UserError)
        assert len((await sampled(backend.engine, request())).tokens()) == 4
