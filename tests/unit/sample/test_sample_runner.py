"""The scheduler and the sampler on a tiny model, beside the trainer on the same rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from descant.errors import NotFound, ServerError, UserError
from descant.model.base import BaseModel
from descant.model.load import ModelSource, load_model
from descant.sample import runner
from descant.sample.plan import SampleLimits, StepPlan
from descant.sample.runner import Sampler
from descant.sample.scheduler import Scheduler
from descant.sample.speculative import DraftContext, Drafter, NgramDrafter
from descant.testing.fake_graphs import FakeCudaGraphs
from descant.testing.learner import LearnerHarness, datum, tokens
from descant.testing.paged_sampler import Finished, run
from descant.testing.tiny import ARCHITECTURES, EOS_TOKEN_ID, MAX_CONTEXT_LENGTH, VOCAB_SIZE, tiny_model
from descant.types import Datum, EncodedText, SampleRequest, SamplingParams, TensorData, Version

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


@pytest.fixture(scope="module")
def even_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes as those of real models. Multiples of 32: no row's numbers are in a loop's scalar tail, which has other
    bits in float32. Large: MKL's sums over fewer inputs would be oneDNN's."""
    sizes = {"hidden_size": 416, "intermediate_size": 448, "num_attention_heads": 4, "head_dim": 32}
    return tiny_model("llama_tied", tmp_path_factory.mktemp("tiny") / "llama_tied_even", **sizes)


@pytest.fixture
def load_even(even_directory: Path) -> Callable[..., BaseModel]:
    def make(dtype: torch.dtype) -> BaseModel:
        source = ModelSource(name="tiny", directory=even_directory)
        return load_model(source, device=torch.device("cpu"), dtype=dtype, check=False)

    return make


class Desk:
    """A scheduler, a sampler and adapters on one model; versions are numbered by their adapter's name."""

    def __init__(
        self,
        model: BaseModel,
        *,
        num_pages: int = NUM_PAGES,
        prefix_caching: bool = True,
        drafter: Drafter | None = None,
        batch_invariant: bool = False,
        **limits: int,
    ):
        fields = {"max_num_seqs": 6, "max_num_batched_tokens": 50, "max_queued_requests": 100, **limits}
        self.model = model
        self.harness = LearnerHarness(model)
        self.sampler = Sampler(model, num_pages=num_pages, batch_invariant=batch_invariant)
        self.scheduler = Scheduler(
            SampleLimits(
                num_pages=num_pages,
                max_context_length=MAX_CONTEXT_LENGTH,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=(EOS_TOKEN_ID,),
                copies_pages=self.sampler.copies_pages,
                **fields,  # type: ignore[arg-type]
            ),
            decode_text=lambda tokens: "".join(chr(33 + token) for token in tokens),
            fresh_seed=lambda: 0,
            prefix_caching=prefix_caching,
            drafter=drafter,
        )

    def publish(self, model_id: str, rank: int = 8, seed: int = 1, **flags: bool) -> Version:
        self.harness.create(model_id, rank, seed=seed, b_std=0.2, **flags)
        version = Version(model_id=model_id, number=1)
        self.model.bank.publish(model_id, version)
        return version

    def add(self, *requests: SampleRequest) -> None:
        for request in requests:
            self.sampler.pin(request.version)
            self.scheduler.add(request)

    def step(self, plan: StepPlan) -> list:
        return self.sampler.step(plan)

    def run(self, *requests: SampleRequest) -> Finished:
        self.add(*requests)
        finished = run(self.scheduler, self)  # type: ignore[arg-type]
        for request in requests:
            self.sampler.unpin(request.version)
        return finished

    def next_logprobs(self, prompt: np.ndarray, version: Version | None = None) -> np.ndarray:
        """Of all tokens after a prompt, at temperature 1: float64 [V]."""
        cells = np.full((len(prompt), VOCAB_SIZE), -1)
        cells[-1] = np.arange(VOCAB_SIZE)
        targets = TensorData(data=cells.ravel(), shape=cells.shape)
        request = ask("next", np.append(prompt, 0), version, target_prompt_logprobs=targets, max_tokens=1)
        found = self.run(request).prompts["next"].target_logprobs
        assert found is not None
        return found.data.reshape(cells.shape)[-1].astype(np.float64)

    def trainer_logprobs(self, model_id: str, sequence: Iterable[int]) -> np.ndarray:
        """Of tokens 1 and up, by a forward pass of the trainer."""
        stream = np.array(list(sequence), np.int32)
        entry = Datum(
            model_input=(EncodedText(tokens=stream[:-1]),),
            loss_fn_inputs={"target_tokens": stream[1:].astype(np.int64)},
        )
        command = self.harness.command(model_id, entry, datum(33, 5), forward_only=True)
        [output] = self.harness.run(command)
        return output.loss_fn_outputs[0]["logprobs"]


def ask(
    request_id: str,
    prompt: np.ndarray,
    version: Version | None = None,
    *,
    num_samples: int = 1,
    **fields: Any,
) -> SampleRequest:
    """Fields of ``SampleRequest`` and of ``SamplingParams`` alike."""
    names = {item.name for item in dataclasses.fields(SampleRequest)}
    of_request = {name: fields.pop(name) for name in names & fields.keys()}
    return SampleRequest(
        request_id=request_id,
        version=version,
        prompt=(EncodedText(tokens=prompt),),
        num_samples=num_samples,
        sampling_params=SamplingParams(**{"seed": 1, "stop": (), "max_tokens": 30, **fields}),
        **of_request,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_equal_the_trainers(load_even: Callable[..., BaseModel], dtype: torch.dtype) -> None:
    """Bit for bit, of sampled and of prompt tokens, with adapters mixed (one of which leaves the MLP alone), prompts in
    chunks, shared and recomputed."""
    desk = Desk(load_even(dtype), num_pages=6)
    versions = [desk.publish(f"m{i}", rank, seed=i, train_mlp=i != 1) for i, rank in enumerate([4, 8, 16])]
    requests = [
        ask(f"r{i}", tokens(length, i), versions[i % 3], num_samples=i % 2 + 1, prompt_logprobs=True, seed=i)
        for i, length in enumerate([1, 5, 64, 65, 130, 17, 100])
    ]
    finished = desk.run(*requests)
    assert desk.scheduler.stats()["preemptions"] > 0
    for request in requests:
        assert request.version is not None
        prompt = request.prompt[0].tokens
        for sample in range(request.num_samples):
            output = finished.tokens[request.request_id, sample]
            reference = desk.trainer_logprobs(request.version.model_id, [*prompt, *output])
            sampled = np.array(finished.logprobs[request.request_id, sample], np.float32)
            np.testing.assert_array_equal(sampled, reference[len(prompt) - 1 :])
            scores = finished.prompts[request.request_id].logprobs
            np.testing.assert_array_equal(scores[1:], reference[: len(prompt) - 1])


def test_the_base_model_equals_an_adapter_of_zeros(load: Callable[..., BaseModel]) -> None:
    desk = Desk(load())
    desk.publish("other")
    desk.harness.create("zero", b_std=0.0)
    finished = desk.run(ask("base", tokens(70, 1)), ask("other", tokens(70, 1), Version(model_id="other", number=1)))
    reference = desk.trainer_logprobs("zero", [*tokens(70, 1), *finished.tokens["base", 0]])
    np.testing.assert_allclose(finished.logprobs["base", 0], reference[69:], rtol=0, atol=1e-4)
    assert finished.tokens["base", 0] != finished.tokens["other", 0]


def test_topk_prompt_logprobs(load: Callable[..., BaseModel]) -> None:
    desk = Desk(load())
    version = desk.publish("m")
    prompt = tokens(300, 3)  # more rows than are scored at once
    finished = desk.run(ask("r", prompt, version, prompt_logprobs=True, topk_prompt_logprobs=3, max_tokens=1))
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


def test_scores_of_a_long_prompt_beside_its_samples(load: Callable[..., BaseModel]) -> None:
    """Tokens sampled and chosen at each position, the likeliest at each sample, against the trainer, over several
    chunks."""
    desk = Desk(load())
    version = desk.publish("m")
    prompt = tokens(130, 3)
    chosen = np.full((129, 2), -1, np.int64)
    chosen[70:, 0], chosen[100:, 1] = np.arange(59) % VOCAB_SIZE, 3
    asked: dict[str, Any] = {
        "target_prompt_logprobs": TensorData(data=chosen.ravel(), shape=chosen.shape),
        "prompt_alt_tokens_k": 3,
        "topk_sample_logprobs": 4,
        "temperature": 0.7,
        "max_tokens": 5,
        "num_samples": 2,
    }
    finished = desk.run(ask("r", prompt, version, **asked))
    scores = finished.prompts["r"]
    assert scores.logprobs is scores.topk is None
    assert scores.target_logprobs is not None
    assert scores.alt_tokens is not None
    cells = scores.target_logprobs.data.reshape(chosen.shape)
    assert (cells[chosen < 0] == 0).all()
    for row in (70, 99, 100, 128):
        for column in range(2):
            if chosen[row, column] >= 0:
                reference = desk.trainer_logprobs("m", [*prompt[: row + 1], chosen[row, column]])[-1]
                assert cells[row, column] == pytest.approx(reference, abs=1e-4)
    assert len(np.unique(scores.alt_tokens.tokens)) > 10
    for row in (0, 49, 50, 128):
        for token, logprob in zip(scores.alt_tokens.tokens[row], scores.alt_tokens.logprobs[row], strict=True):
            reference = desk.trainer_logprobs("m", [*prompt[: row + 1], token])[-1]
            assert logprob == pytest.approx(reference, abs=1e-4)
    output = finished.tokens["r", 1]
    ids, logprobs = finished.topk["r", 1]
    assert len(ids) == 5
    for index in range(5):
        logits = desk.next_logprobs(np.array([*prompt, *output[:index]]), version) / 0.7
        expected = logits - np.log(np.exp(logits).sum())
        np.testing.assert_allclose(logprobs[index], np.sort(expected)[::-1][:4], atol=1e-4)
        np.testing.assert_allclose(expected[ids[index]], logprobs[index], atol=1e-4)
        assert finished.logprobs["r", 1][index] == pytest.approx(expected[output[index]], abs=1e-4)

    again = desk.run(ask("n", tokens(40, 9)), ask("r", prompt, version, **asked | {"prompt_alt_tokens_k": 2}))
    assert again.prompts["r"].alt_tokens is not None
    assert (again.prompts["r"].alt_tokens.tokens == scores.alt_tokens.tokens[:, :2]).all(), "an alternative is its own"


def test_scores_of_the_end_of_a_prompt_compute_no_more_of_it_than_they_must(load: Callable[..., BaseModel]) -> None:
    desk = Desk(load(), max_num_seqs=1)
    prompt = tokens(200, 3)
    whole = desk.run(ask("r", prompt, prompt_logprobs=True, max_tokens=1)).prompts["r"].logprobs
    end = desk.run(ask("r", prompt, prompt_logprobs=True, prompt_logprobs_last_n=5, max_tokens=1)).prompts["r"].logprobs
    assert whole is not None
    assert end is not None
    assert np.isnan(end[:195]).all()
    np.testing.assert_allclose(end[195:], whole[195:], atol=1e-6)


@pytest.mark.parametrize(("dtype", "even"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
def test_a_request_gives_the_same_whatever_else_is_in_the_batch(
    load: Callable[..., BaseModel], load_even: Callable[..., BaseModel], dtype: torch.dtype, even: bool
) -> None:
    model = load_even(dtype) if even else load(dtype)
    options: dict[str, Any] = {"batch_invariant": dtype == torch.float32 and not even}
    quiet, busy = (
        Desk(model, num_pages=NUM_PAGES, **options),
        Desk(model, num_pages=5, max_num_batched_tokens=23, **options),
    )
    version, other = quiet.publish("m"), quiet.publish("other", 64)
    request = ask("r", tokens(90, 1), version, num_samples=3, max_tokens=60, temperature=0.8, top_p=0.95)
    expected = quiet.run(request)
    neighbours = [ask(f"n{i}", tokens(20 + 17 * i, i), [other, None, version][i % 3], seed=i) for i in range(8)]
    finished = busy.run(*neighbours[:4], request, *neighbours[4:])
    assert busy.scheduler.stats()["preemptions"] > 0
    for sample in range(3):
        assert finished.tokens["r", sample] == expected.tokens["r", sample]
        assert finished.logprobs["r", sample] == expected.logprobs["r", sample]
    again = quiet.run(request)
    assert (again.tokens, again.logprobs) == (expected.tokens, expected.logprobs)


def test_adapters_that_come_and_train_meanwhile_change_nothing(load: Callable[..., BaseModel]) -> None:
    """Slabs grow and move, rows are published and released, the version's own adapter goes on training."""
    desk = Desk(load(version_bytes=1))
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
        desk.harness.run(desk.harness.command("m", datum(9, count)), desk.harness.command(newcomer.model_id, datum(5)))
        desk.harness.step("m")
        if count % 3 == 0:
            desk.model.bank.release(newcomer)
            desk.model.bank.delete(newcomer.model_id)
    assert count == 30
    assert finished.tokens == expected.tokens
    assert finished.logprobs == expected.logprobs
    desk.sampler.unpin(version)
    with pytest.raises(NotFound):
        desk.sampler.pin(version)


def test_training_goes_on_after_sampling(load: Callable[..., BaseModel]) -> None:
    fresh, used = Desk(load()), Desk(load())
    for desk in (fresh, used):
        desk.publish("m")
    used.run(ask("r", tokens(50, 1), Version(model_id="m", number=1), num_samples=2, prompt_logprobs=True))
    for desk in (fresh, used):
        desk.harness.run(desk.harness.command("m", datum(20, 1)))
    assert torch.equal(fresh.harness.gradient("m"), used.harness.gradient("m"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_overflow_fail_their_own_request(load: Callable[..., BaseModel], dtype: torch.dtype) -> None:
    desk = Desk(load(dtype))
    good, bad = desk.publish("good"), Version(model_id="bad", number=1)
    requests = [ask("g", tokens(40, 1), good), ask("base", tokens(40, 2))]
    expected = desk.run(*requests)
    desk.harness.create("bad", 8)
    desk.model.bank.weights("bad").mul_(1e37)
    desk.model.bank.refresh_compute("bad")
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
    desk = Desk(load(), prefix_caching=False)
    request = ask("r", tokens(90, 1), num_samples=2)
    expected = desk.run(request)
    for pool in (*desk.sampler._pool.keys, *desk.sampler._pool.values):
        pool.fill_(torch.nan)
    finished = desk.run(request)
    assert finished.tokens == expected.tokens
    assert finished.logprobs == expected.logprobs


def test_one_sequence_a_pass_where_the_model_is_not_packable(load: Callable[..., BaseModel]) -> None:
    packing, model = Desk(load()), load()
    model.facts = dataclasses.replace(model.facts, packable=False)
    desk = Desk(model)
    version = desk.publish("m")
    assert packing.publish("m") == version
    requests = [ask("a", tokens(70, 1), version, num_samples=3, prompt_logprobs=True), ask("b", tokens(20, 2))]
    expected = packing.run(*requests)
    passes: list[int] = []
    decoder_forward = model.decoder_forward
    model.decoder_forward = lambda tokens_T, positions_T, batch: (  # type: ignore[method-assign]
        passes.append(len(batch.seq_lens)),
        decoder_forward(tokens_T, positions_T, batch),
    )[1]
    finished = desk.run(*requests)
    assert set(passes) == {1}
    assert finished.tokens == expected.tokens


# ------------------------------------------------------------------------------------------------- speculative decoding
class KnownDrafts:
    """Of known sequences what comes next, every third token wrong."""

    def __init__(self, known: Iterable[list[int]]):
        self._known = list(known)
        self._count = 0

    def propose(self, contexts: Sequence[DraftContext]) -> list[tuple[int, ...]]:
        return [self._propose(context) for context in contexts]

    def _propose(self, context: DraftContext) -> tuple[int, ...]:
        place = len(context.output_tokens)
        for output in self._known:
            if output[:place] == list(context.output_tokens):
                ahead = output[place : place + context.limit]
                self._count += len(ahead)
                return tuple((t + 1) % VOCAB_SIZE if (self._count + i) % 3 == 0 else t for i, t in enumerate(ahead))
        return (1,) * context.limit

    def accepted(self, sequence: int, drafted: int, accepted: int) -> None:
        pass

    def ended(self, sequence: int) -> None:
        pass


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_drafts_change_no_token_and_no_bit(tmp_path: Path, arch: str) -> None:
    """Greedy, sampled and cut, with adapters mixed, through every way a step is computed."""
    source = ModelSource(name="tiny", directory=tiny_model(arch, tmp_path / arch))
    try:
        model = load_model(source, device=torch.device("cpu"), dtype=torch.bfloat16)
    except UserError:
        pytest.skip("not served")
    desk = Desk(model)
    versions = [None, desk.publish("m", 8), desk.publish("n", 16, seed=2)]
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "topk_sample_logprobs": 3},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
    ]
    requests = [
        ask(f"r{i}{j}", tokens(20 + 10 * i, i), version, max_tokens=12, seed=i, **params[j])
        for i, version in enumerate(versions)
        for j in range(3)
    ]
    expected = desk.run(*requests)
    speculative = Desk(model, drafter=KnownDrafts(expected.tokens.values()))
    speculative.sampler, speculative.harness = desk.sampler, desk.harness
    finished = speculative.run(*requests)
    stats = speculative.scheduler.stats()
    assert stats["drafted_tokens"] > stats["accepted_tokens"] > 0
    assert finished.tokens == expected.tokens
    if not model.has_experts:  # an expert's product has other rows then
        assert finished.logprobs == expected.logprobs
        assert finished.topk == expected.topk


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("drafter", [None, NgramDrafter()], ids=["plain", "speculative"])
def test_graphs_sample_the_tokens_of_the_modules(
    load: Callable[..., BaseModel], drafter: Drafter | None, captures: bool
) -> None:
    """Cut and likeliest tokens are taken from the logits that a graph leaves; drafts are prefilled."""
    plain = Desk(load())
    versions = [None, plain.publish("m", 8), plain.publish("n", 16, seed=2)]
    params: list[dict[str, Any]] = [
        {"temperature": 0.0, "topk_sample_logprobs": 2},
        {"temperature": 0.9},
        {"top_p": 0.9, "topk_sample_logprobs": 4},
    ]
    prompts = [np.tile(tokens(12 + i, i), 3) for i in range(3)]
    requests = [ask(f"r{i}{j}", prompts[i], versions[i], seed=i, **params[j]) for i in range(3) for j in range(3)]
    expected = plain.run(*requests)
    graphs = Desk(plain.model, drafter=drafter)
    graphs.sampler = plain.sampler
    fake_graphs = FakeCudaGraphs.install(plain.sampler, max_rows=4, captures=captures)
    finished = graphs.run(*requests)
    assert len(fake_graphs.steps) > 30
    assert bool(fake_graphs.captured) == captures
    assert finished.tokens == expected.tokens
    for key, (ids, logprobs) in expected.topk.items():
        assert finished.topk[key][0] == ids
        np.testing.assert_allclose(finished.topk[key][1], logprobs, atol=1e-4)


def test_a_step_ahead_of_new_weights_counts_as_the_old_ones(load: Callable[..., BaseModel]) -> None:
    """Its tokens are the old weights', although these are gone when it is taken in; the next step's are the new."""
    new = Version(model_id="m", number=2)

    def moved_after(num_steps: int, *, graphs: bool) -> Finished:
        desk, finished = Desk(load()), Finished()
        sampler, bank = desk.sampler, desk.model.bank
        old, other = desk.publish("m", 8), desk.publish("n", 16, seed=2)
        if graphs:
            FakeCudaGraphs.install(sampler)
        desk.add(
            *(ask(f"moves{i}", tokens(20 + i, i), old, seed=i, stream=i > 0, inflight=True) for i in range(3)),
            ask("stays", tokens(30, 7), other),
            ask("base", tokens(31, 8)),
        )
        for _ in range(num_steps):
            plan = desk.scheduler.plan()
            assert plan is not None
            finished.take(desk.scheduler.apply(plan, sampler.step(plan)))
        desk.harness.create("later", 32, seed=5, b_std=0.3)  # its rows come behind the others'
        bank.publish("later", new)
        sampler.pin(new, 3)
        desk.scheduler.move(desk.scheduler.followers(new), new)
        sampler.unpin(old, 3)
        row = bank.pin_version(old)
        bank.compute_slab(row.rank_bucket)[row.slot].fill_(torch.nan)
        return run(desk.scheduler, desk, finished)  # type: ignore[arg-type]

    ahead, plain = moved_after(11, graphs=True), moved_after(12, graphs=False)
    assert len(plain.versions["moves0", 0]) == 30
    for i in range(3):
        crossed = ahead.versions["moves0", 0].index(new)
        assert ahead.versions[f"moves{i}", 0] == plain.versions[f"moves{i}", 0]
    assert 9 < crossed < 13
    assert ahead.tokens == plain.tokens
    assert ahead.versions == plain.versions
    for key, logprobs in plain.logprobs.items():
        np.testing.assert_allclose(ahead.logprobs[key], logprobs, atol=1e-4)


@pytest.mark.parametrize("rank", [0, 40], ids=["often right", "nearly always wrong"])
def test_speculative_sampling_follows_the_exact_distribution(load: Callable[..., BaseModel], rank: int) -> None:
    model = load()
    """Of a sample's second token, the first being given."""
    prompt, temperature, num_tokens = tokens(5, 1), 0.7, 1200
    weights = np.exp(Desk(model).next_logprobs(prompt) / temperature)
    order = np.argsort(-weights)

    class OneToken(KnownDrafts):
        def propose(self, contexts: Sequence[DraftContext]) -> list[tuple[int, ...]]:
            return [(int(order[rank]),)] * len(contexts)

    speculative = Desk(model, max_num_seqs=64, drafter=OneToken([]))

    def given(plan: StepPlan) -> list:
        return [
            dataclasses.replace(output, tokens=(int(prompt[4]),)) if step.rng_offset == 0 and output.tokens else output
            for step, output in zip(plan.sequences, speculative.sampler.step(plan), strict=True)
        ]

    speculative.step = given  # type: ignore[method-assign]
    samples = {"num_samples": 100, "max_tokens": 3, "temperature": temperature}
    finished = speculative.run(*(ask(f"r{i}", prompt[:4], seed=i, **samples) for i in range(num_tokens // 100)))
    second = np.array([sequence[1] for sequence in finished.tokens.values()])
    assert speculative.scheduler.stats()["drafted_steps"] == num_tokens
    counts = np.bincount(second, minlength=VOCAB_SIZE)[order]
    expected = weights[order] / weights.sum() * num_tokens
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    assert scipy_stats.chisquare(observed, wanted).pvalue > 0.001
    likely = expected[rank] / num_tokens
    assert (second == order[rank]).mean() == pytest.approx(likely, abs=4 * (likely / num_tokens) ** 0.5)


def test_repetitions_are_drafted(load: Callable[..., BaseModel]) -> None:
    desk = Desk(load(), drafter=NgramDrafter())
    prompt = np.tile(tokens(20, 1), 4)
    expected = Desk(load()).run(ask("r", prompt, temperature=0.0, max_tokens=40))
    assert desk.run(ask("r", prompt, temperature=0.0, max_tokens=40)).tokens == expected.tokens
    assert desk.scheduler.stats()["drafted_tokens"] > 0


def test_samples_of_one_prompt_compute_it_once(load: Callable[..., BaseModel]) -> None:
    desk = Desk(load(), max_num_seqs=16)
    desk.run(ask("r", tokens(150, 1), num_samples=8, max_tokens=2))
    assert desk.scheduler.stats()["prefilled_tokens"] == 150 + 7


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_have_the_same_bits_in_rows_and_through_the_modules(
    load_even: Callable[..., BaseModel], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for most in (runner.ROW_TOKENS, 0):
        monkeypatch.setattr(runner, "ROW_TOKENS", most)
        desk = Desk(load_even(dtype), max_num_batched_tokens=200)
        version, other = desk.publish("m", 8), desk.publish("n", 16)
        desk.add(ask("long", tokens(70, 9), other, num_samples=2))
        for number, (length, of) in enumerate([(9, version), (30, other), (1, None), (48, version), (140, None)]):
            desk.add(ask(f"r{number}", tokens(length, number), of, num_samples=1 + number % 2, topk_sample_logprobs=2))
        outcomes.append(run(desk.scheduler, desk))  # type: ignore[arg-type]
    in_rows, through_modules = outcomes
    assert in_rows.tokens == through_modules.tokens
    assert in_rows.logprobs == through_modules.logprobs
    assert in_rows.topk == through_modules.topk


@pytest.mark.parametrize("dtype", DTYPES)
def test_cached_prefixes_change_nothing(load_even: Callable[..., BaseModel], dtype: torch.dtype) -> None:
    """Prompts begin alike, go on with what was sampled, and pages are few."""
    outcomes = []
    for prefix_caching in (True, False):
        desk = Desk(load_even(dtype), num_pages=7, prefix_caching=prefix_caching)
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
        assert (desk.scheduler.stats()["hit_tokens"] > 2000) == prefix_caching
    for kept, computed in zip(*outcomes, strict=True):
        assert kept.tokens == computed.tokens
        assert kept.logprobs == computed.logprobs


def test_versions_are_pinned_while_a_request_uses_them(load: Callable[..., BaseModel]) -> None:
    desk = Desk(load(version_bytes=1))  # room for no version that is not pinned
    version = desk.publish("m")
    with pytest.raises(NotFound):
        desk.sampler.pin(Version(model_id="m", number=2))
    desk.sampler.pin(version)
    desk.sampler.pin(version)
    desk.publish("n")
    desk.sampler.unpin(version)
    assert desk.model.bank.stats()["versions_resident"] >= 1
    desk.scheduler.add(ask("r", tokens(5, 1), version, max_tokens=2))
    assert run(desk.scheduler, desk).reasons == {("r", 0): "length"}  # type: ignore[arg-type]
    desk.sampler.unpin(version)
    desk.scheduler.add(ask("r", tokens(5, 1), version, max_tokens=2))
    with pytest.raises(ServerError, match="no request has pinned"):
        run(desk.scheduler, desk)  # type: ignore[arg-type]
