"""The scheduler and the sampler on a tiny model, beside the trainer on the same rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from descant.errors import NotFound, ServerError, UserError
from descant.model.base import BaseModel
from descant.model.load import ModelSource, load_model
from descant.sample.scheduler import SampleLimits, Scheduler, StepPlan
from descant.sample.step import Sampler
from descant.testing.paged_sampler import Finished, run
from descant.testing.studio import Studio, datum, tokens
from descant.testing.tiny import EOS_TOKEN_ID, MAX_CONTEXT_LENGTH, VOCAB_SIZE, tiny_model
from descant.types import Datum, EncodedText, SampleRequest, SamplingParams, Version

NUM_PAGES = 20
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama_tied", tmp_path_factory.mktemp("tiny") / "llama_tied")


@pytest.fixture
def load(directory: Path) -> Callable[..., BaseModel]:
    def make(dtype: torch.dtype = torch.float32, **options: int) -> BaseModel:
        source = ModelSource(name="tiny", directory=directory)
        return load_model(source, device=torch.device("cpu"), dtype=dtype, check=False, **options)  # type: ignore

    return make


class Desk:
    """A scheduler, a sampler and adapters on one model; versions are numbered by their adapter's name."""

    def __init__(self, model: BaseModel, *, num_pages: int = NUM_PAGES, keeps_prefixes: bool = True, **limits: int):
        fields = {"max_running": 6, "step_tokens": 50, "max_waiting": 100, **limits}
        self.model = model
        self.studio = Studio(model)
        self.sampler = Sampler(model, num_pages=num_pages)
        self.scheduler = Scheduler(
            SampleLimits(
                num_pages=num_pages,
                max_context_length=MAX_CONTEXT_LENGTH,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=(EOS_TOKEN_ID,),
                **fields,
            ),
            decode_text=lambda tokens: "".join(chr(33 + token) for token in tokens),
            fresh_seed=lambda: 0,
            keeps_prefixes=keeps_prefixes,
        )

    def publish(self, model_id: str, rank: int = 8, seed: int = 1) -> Version:
        self.studio.create(model_id, rank, seed=seed, b_std=0.2)
        version = Version(model_id=model_id, number=1)
        self.model.bank.publish(model_id, version)
        return version

    def add(self, *requests: SampleRequest) -> None:
        for request in requests:
            self.sampler.acquire(request.version)
            self.scheduler.add(request)

    def step(self, plan: StepPlan) -> list:
        return self.sampler.step(plan)

    def run(self, *requests: SampleRequest) -> Finished:
        self.add(*requests)
        finished = run(self.scheduler, self)  # type: ignore[arg-type]
        for request in requests:
            self.sampler.release(request.version)
        return finished

    def trainer_logprobs(self, model_id: str, sequence: Iterable[int]) -> np.ndarray:
        """Of tokens 1 and up, by a forward pass of the trainer."""
        stream = np.array(list(sequence), np.int32)
        entry = Datum(
            model_input=(EncodedText(tokens=stream[:-1]),),
            loss_fn_inputs={"target_tokens": stream[1:].astype(np.int64)},
        )
        command = self.studio.command(model_id, entry, datum(33, 5), forward_only=True)
        [output] = self.studio.run(command)
        return output.loss_fn_outputs[0]["logprobs"]


def ask(
    request_id: str,
    prompt: np.ndarray,
    version: Version | None = None,
    *,
    num_samples: int = 1,
    prompt_logprobs: bool = False,
    topk_prompt_logprobs: int = 0,
    **params: object,
) -> SampleRequest:
    return SampleRequest(
        request_id=request_id,
        version=version,
        prompt=(EncodedText(tokens=prompt),),
        num_samples=num_samples,
        sampling_params=SamplingParams(**{"seed": 1, "stop": (), "max_tokens": 30, **params}),  # type: ignore[arg-type]
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=topk_prompt_logprobs,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_equal_the_trainers(load: Callable[..., BaseModel], dtype: torch.dtype) -> None:
    """Of sampled and of prompt tokens, with adapters mixed, prompts in chunks, shared and recomputed."""
    desk = Desk(load(dtype), num_pages=6)
    versions = [desk.publish(f"m{i}", rank, seed=i) for i, rank in enumerate([4, 8, 16])]
    requests = [
        ask(f"r{i}", tokens(length, i), versions[i % 3], num_samples=i % 2 + 1, prompt_logprobs=True, seed=i)
        for i, length in enumerate([1, 5, 64, 65, 130, 17, 100])
    ]
    finished = desk.run(*requests)
    assert desk.scheduler.stats()["preemptions"] > 0
    tolerance = 0.0 if dtype == torch.bfloat16 else 1e-4
    for request in requests:
        assert request.version is not None
        prompt = request.prompt[0].tokens
        for sample in range(request.num_samples):
            drawn = finished.tokens[request.request_id, sample]
            reference = desk.trainer_logprobs(request.version.model_id, [*prompt, *drawn])
            sampled = np.array(finished.logprobs[request.request_id, sample], np.float32)
            np.testing.assert_allclose(sampled, reference[len(prompt) - 1 :], rtol=0, atol=tolerance)
            scores = finished.prompts[request.request_id].logprobs
            np.testing.assert_allclose(scores[1:], reference[: len(prompt) - 1], rtol=0, atol=tolerance)


def test_the_base_model_equals_an_adapter_of_zeros(load: Callable[..., BaseModel]) -> None:
    desk = Desk(load())
    desk.publish("other")
    desk.studio.create("zero", b_std=0.0)
    finished = desk.run(ask("base", tokens(70, 1)), ask("other", tokens(70, 1), Version(model_id="other", number=1)))
    reference = desk.trainer_logprobs("zero", [*tokens(70, 1), *finished.tokens["base", 0]])
    np.testing.assert_allclose(finished.logprobs["base", 0], reference[69:], rtol=0, atol=1e-4)
    assert finished.tokens["base", 0] != finished.tokens["other", 0]


def test_topk_prompt_logprobs(load: Callable[..., BaseModel]) -> None:
    desk = Desk(load())
    version = desk.publish("m")
    prompt = tokens(300, 3)  # more rows than are scored at once
    finished = desk.run(ask("r", prompt, version, topk_prompt_logprobs=3, max_tokens=1))
    scores = finished.prompts["r"]
    assert scores.topk is not None
    ids, logprobs = scores.topk.token_ids, scores.topk.logprobs
    assert ids.shape == logprobs.shape == (300, 3)
    assert (np.diff(logprobs[1:], axis=1) <= 0).all()
    for rank in range(3):
        for position in (1, 64, 255, 256, 257, 299):
            likely = ids[position, rank]
            reference = desk.trainer_logprobs("m", [*prompt[:position], likely])[-1]
            assert logprobs[position, rank] == pytest.approx(reference, abs=1e-4)
    is_best = ids[1:, 0] == prompt[1:]
    np.testing.assert_allclose(scores.logprobs[1:][is_best], logprobs[1:, 0][is_best], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_gives_the_same_whatever_else_is_in_the_batch(
    load: Callable[..., BaseModel], dtype: torch.dtype
) -> None:
    model = load(dtype)
    quiet, busy = Desk(model, num_pages=NUM_PAGES), Desk(model, num_pages=8, step_tokens=23)
    version, other = quiet.publish("m"), quiet.publish("other", 64)
    request = ask("r", tokens(90, 1), version, num_samples=3, max_tokens=60, temperature=0.8, top_p=0.95)
    expected = quiet.run(request)
    neighbours = [ask(f"n{i}", tokens(20 + 17 * i, i), [other, None, version][i % 3], seed=i) for i in range(8)]
    finished = busy.run(*neighbours[:4], request, *neighbours[4:])
    assert busy.scheduler.stats()["preemptions"] > 0
    for sample in range(3):
        assert finished.tokens["r", sample] == expected.tokens["r", sample]
    again = quiet.run(request)  # on the prefix that is there by now
    assert again.tokens == expected.tokens
    for key, logprobs in expected.logprobs.items():
        tolerance = 0.0 if dtype == torch.bfloat16 else 1e-4
        np.testing.assert_allclose(again.logprobs[key], logprobs, rtol=0, atol=tolerance)


def test_adapters_that_come_and_train_meanwhile_change_nothing(load: Callable[..., BaseModel]) -> None:
    """Slabs grow and move, rows are published and released, the version's own adapter goes on training."""
    desk = Desk(load(max_version_bytes=1))
    version = desk.publish("m", 8)
    request = ask("r", tokens(50, 1), version, temperature=0.0)
    expected = desk.run(request)

    desk.add(request)
    desk.model.bank.release(version)  # no new request; this one goes on
    finished, count = Finished(), 0
    while (plan := desk.scheduler.plan()) is not None:
        outputs = desk.step(plan)
        finished.take(desk.scheduler.apply(plan, outputs))
        count += 1
        newcomer = desk.publish(f"m{count}", 8, seed=count)
        desk.studio.run(desk.studio.command("m", datum(9, count)), desk.studio.command(newcomer.model_id, datum(5)))
        desk.studio.step("m")
        if count % 3 == 0:
            desk.model.bank.release(newcomer)
            desk.model.bank.delete(newcomer.model_id)
    assert count == 30
    assert finished.tokens == expected.tokens
    assert finished.logprobs == expected.logprobs
    desk.sampler.release(version)
    with pytest.raises(NotFound):
        desk.sampler.acquire(version)


def test_training_goes_on_after_sampling(load: Callable[..., BaseModel]) -> None:
    fresh, used = Desk(load()), Desk(load())
    for desk in (fresh, used):
        desk.publish("m")
    used.run(ask("r", tokens(50, 1), Version(model_id="m", number=1), num_samples=2, prompt_logprobs=True))
    for desk in (fresh, used):
        desk.studio.run(desk.studio.command("m", datum(20, 1)))
    assert torch.equal(fresh.studio.gradient("m"), used.studio.gradient("m"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_overflow_fail_their_own_request(load: Callable[..., BaseModel], dtype: torch.dtype) -> None:
    desk = Desk(load(dtype))
    good, bad = desk.publish("good"), Version(model_id="bad", number=1)
    requests = [ask("g", tokens(40, 1), good), ask("base", tokens(40, 2))]
    expected = desk.run(*requests)
    desk.studio.create("bad", 8)
    desk.model.bank.weights("bad").mul_(1e37)
    desk.model.bank.refresh_work("bad")
    desk.model.bank.publish("bad", bad)
    finished = desk.run(
        requests[0],
        ask("b", tokens(100, 3), bad, num_samples=2),
        ask("bs", tokens(9, 4), bad, prompt_logprobs=True),
        requests[1],
    )
    failures = dict(desk.scheduler.take_failures())
    assert set(failures) == {"b", "bs"}
    for failure in failures.values():
        assert isinstance(failure, UserError)
        assert "the logits are not finite" in str(failure)
    assert finished.tokens == expected.tokens
    for key, logprobs in expected.logprobs.items():
        np.testing.assert_allclose(
            finished.logprobs[key], logprobs, rtol=0, atol=0 if dtype == torch.bfloat16 else 1e-4
        )


def test_what_a_page_held_before_does_not_matter(load: Callable[..., BaseModel]) -> None:
    desk = Desk(load(), keeps_prefixes=False)
    request = ask("r", tokens(90, 1), num_samples=2)
    expected = desk.run(request)
    for pool in (*desk.sampler._pool.keys, *desk.sampler._pool.values):
        pool.fill_(torch.nan)
    finished = desk.run(request)
    assert finished.tokens == expected.tokens
    assert finished.logprobs == expected.logprobs


def test_one_sequence_a_pass_where_the_model_is_not_packable(load: Callable[..., BaseModel]) -> None:
    model = load()
    desk = Desk(model)
    version = desk.publish("m")
    requests = [ask("a", tokens(70, 1), version, num_samples=3, prompt_logprobs=True), ask("b", tokens(20, 2))]
    expected = desk.run(*requests)
    model.facts = dataclasses.replace(model.facts, packable=False)
    passes: list[int] = []
    trunk = model.trunk
    model.trunk = lambda tokens_T, positions_T, pass_: (  # type: ignore[method-assign]
        passes.append(len(pass_.seq_lens)),
        trunk(tokens_T, positions_T, pass_),
    )[1]
    finished = desk.run(*requests)
    assert set(passes) == {1}
    assert finished.tokens == expected.tokens


def test_samples_of_one_prompt_compute_it_once(load: Callable[..., BaseModel]) -> None:
    desk = Desk(load(), max_running=16)
    desk.run(ask("r", tokens(150, 1), num_samples=8, max_tokens=2))
    assert desk.scheduler.stats()["prefilled_tokens"] == 150 + 7 * (150 - 128)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_prefixes_change_nothing(load: Callable[..., BaseModel], dtype: torch.dtype) -> None:
    """Bit for bit in bfloat16. Prompts begin alike, go on with what was sampled, and pages are few."""
    outcomes = []
    for keeps_prefixes in (True, False):
        desk = Desk(load(dtype), num_pages=7, keeps_prefixes=keeps_prefixes)
        version = desk.publish("m", 8)
        start, finished = tokens(130, 1), []
        for turn in range(3):
            requests = [
                ask(f"{turn}-{i}", np.concatenate([start, tokens(i, i)]), v, num_samples=2, max_tokens=9, seed=i)
                for i, v in enumerate([version, None, version, None])
            ]
            finished.append(desk.run(*requests))
            start = np.concatenate([start, np.array(finished[-1].tokens[f"{turn}-0", 1], np.int32)])
        outcomes.append(finished)
        assert (desk.scheduler.stats()["hit_tokens"] > 2000) == keeps_prefixes
    for kept, computed in zip(*outcomes, strict=True):
        assert kept.tokens == computed.tokens
        if dtype == torch.bfloat16:
            assert kept.logprobs == computed.logprobs
        for key, logprobs in computed.logprobs.items():
            np.testing.assert_allclose(kept.logprobs[key], logprobs, rtol=0, atol=1e-4)


def test_versions_are_pinned_while_a_request_uses_them(load: Callable[..., BaseModel]) -> None:
    desk = Desk(load(max_version_bytes=1))  # room for no version that is not pinned
    version = desk.publish("m")
    with pytest.raises(NotFound):
        desk.sampler.acquire(Version(model_id="m", number=2))
    desk.sampler.acquire(version)
    desk.sampler.acquire(version)
    desk.publish("n")
    desk.sampler.release(version)
    assert desk.model.bank.stats()["versions_resident"] >= 1
    desk.scheduler.add(ask("r", tokens(5, 1), version, max_tokens=2))
    assert run(desk.scheduler, desk).reasons == {("r", 0): "length"}  # type: ignore[arg-type]
    desk.sampler.release(version)
    desk.scheduler.add(ask("r", tokens(5, 1), version, max_tokens=2))
    with pytest.raises(ServerError, match="no request has acquired"):
        run(desk.scheduler, desk)  # type: ignore[arg-type]
