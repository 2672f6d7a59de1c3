"""On a CUDA device: decode steps as graphs give what the model alone gives, whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from descant.adapters.slots import Reallocation
from descant.model.base import BaseModel
from descant.model.load import ModelSource, load_model
from descant.sample.cuda_graphs import DecodeKey, PrefillKey, token_buckets
from descant.sample.plan import SampleLimits
from descant.sample.runner import Sampler
from descant.sample.scheduler import Scheduler
from descant.testing.learner import LearnerHarness
from descant.testing.paged_sampler import Finished, run
from descant.testing.tiny import MAX_CONTEXT_LENGTH, VOCAB_SIZE, tiny_model
from descant.types import Datum, EncodedText, SampleRequest, SamplingParams, Version

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RANKS = {"a": 4, "b": 8, "c": 16, "d": 64, "e": 1, "f": 256}
FEW = {name: rank for name, rank in RANKS.items() if name != "f"}
"""These fit the fused LoRA-A columns, all of them do not."""
ARCHITECTURES = ["llama", "qwen3", "gemma2", "mistral", "gpt_neox", "qwen3_moe"]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., BaseModel]:
    def make(arch: str, dtype: torch.dtype = torch.float32, *, compile: bool | None = None) -> BaseModel:
        source = ModelSource(name=arch, directory=tiny_model(arch, tmp_path / arch))
        return load_model(source, device=torch.device("cuda"), dtype=dtype, compile=compile)

    return make


def publish(model: BaseModel, ranks: dict[str, int] = RANKS) -> tuple[LearnerHarness, dict[str, Version]]:
    harness = LearnerHarness(model)
    versions = {}
    for number, (name, rank) in enumerate(ranks.items()):
        harness.create(name, rank, seed=number)
        versions[name] = Version(model_id=name, number=1)
        model.bank.publish(name, versions[name])
    return harness, versions


def prompt(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(3, VOCAB_SIZE, 9 + 17 * (number % 7)).astype(np.int32)


def sample(
    model: BaseModel,
    who: dict[str, tuple[Version | None, np.ndarray]],
    *,
    sampler: Sampler | None = None,
    num_pages: int = 64,
    max_tokens: int = 40,
    compiled: bool = False,
    **params: object,
) -> tuple[Finished, Scheduler]:
    scheduler = make_scheduler(num_pages)
    sampler = sampler or Sampler(model, num_pages=num_pages, compile_decode=compiled)
    for name, (version, tokens) in who.items():
        sampler.pin(version)
        scheduler.add(wanted(name, version, tokens, max_tokens=max_tokens, **params))
    return run(scheduler, sampler), scheduler  # type: ignore[arg-type]


def make_scheduler(num_pages: int) -> Scheduler:
    return Scheduler(
        SampleLimits(
            max_num_seqs=32,
            num_pages=num_pages,
            max_num_batched_tokens=50,
            max_queued_requests=100,
            max_context_length=MAX_CONTEXT_LENGTH,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
        ),
        decode_text=lambda tokens: "",
        fresh_seed=lambda: 0,
    )


def wanted(
    name: str, version: Version | None, tokens: np.ndarray, *, inflight: bool = False, **params: object
) -> SampleRequest:
    return SampleRequest(
        request_id=name,
        version=version,
        prompt=(EncodedText(tokens=tokens),),
        num_samples=1,
        sampling_params=SamplingParams(**{"seed": 7, "stop": (), **params}),  # type: ignore[arg-type]
        inflight=inflight,
    )


@pytest.mark.parametrize("num_pages", [64, 7])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_equals_generate_beside_adapters(load: Callable[..., BaseModel], arch: str, num_pages: int) -> None:
    """With 7 pages the sequences push one another out and are computed again."""
    from transformers import AutoModelForCausalLM

    model = load(arch)
    _, versions = publish(model)
    names = list(versions)
    who = {f"base{n}": (None, prompt(n)) for n in range(6)}
    who |= {f"{names[n]}": (versions[names[n]], prompt(n)) for n in range(6)}
    finished, scheduler = sample(model, who, num_pages=num_pages, temperature=0.0)
    assert (scheduler.stats()["preemptions"] > 0) == (num_pages == 7)
    alone = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32).cuda().eval()
    for n in range(6):
        ids = torch.tensor(prompt(n), device="cuda")[None].long()
        want = alone.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            min_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, ids.shape[1] :].tolist()
        assert list(finished.tokens[f"base{n}", 0]) == want, n


@pytest.mark.parametrize("ranks", [RANKS, FEW], ids=["apart", "fused"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2"])
def test_logprobs_equal_the_trainers(
    load: Callable[..., BaseModel], arch: str, dtype: torch.dtype, tolerance: float, ranks: dict[str, int]
) -> None:
    model = load(arch, dtype)
    harness, versions = publish(model, ranks)
    who = {f"{name}{n}": (version, prompt(n)) for n in range(3) for name, version in versions.items()}
    finished, _ = sample(model, who)
    differences = []
    for name, (version, tokens) in who.items():
        assert version is not None
        whole = np.concatenate([tokens, finished.tokens[name, 0]])
        scored = Datum(
            model_input=(EncodedText(tokens=whole[:-1].astype(np.int32)),),
            loss_fn_inputs={"target_tokens": whole[1:].astype(np.int64)},
        )
        [output] = harness.run(harness.command(version.model_id, scored, forward_only=True))
        trained = output.loss_fn_outputs[0]["logprobs"][len(tokens) - 1 :]
        differences.append(np.abs(trained - np.array(finished.logprobs[name, 0], np.float32)))
    assert np.concatenate(differences).mean() <= tolerance


@pytest.mark.parametrize("ranks", [RANKS, FEW], ids=["apart", "fused"])
@pytest.mark.parametrize("arch", ["qwen3", "gemma2"])
def test_compiled_layers_draw_the_same(load: Callable[..., BaseModel], arch: str, ranks: dict[str, int]) -> None:
    model = load(arch)
    _, versions = publish(model, ranks)
    who: dict[str, tuple[Version | None, np.ndarray]] = {name: (v, prompt(2)) for name, v in versions.items()}
    who["base"] = (None, prompt(2))
    plain, fused = (sample(model, who, compiled=compiled, max_tokens=20)[0] for compiled in (False, True))
    for name in who:
        assert list(plain.tokens[name, 0]) == list(fused.tokens[name, 0])
        np.testing.assert_allclose(plain.logprobs[name, 0], fused.logprobs[name, 0], atol=1e-4)


@pytest.mark.parametrize("arch", ["qwen3", "gemma2"])
def test_after_the_start_nothing_is_compiled_or_captured_for_the_base(
    load: Callable[..., BaseModel], arch: str
) -> None:
    """Prefill and decode steps of any number of rows, tokens and adapters are the programs made at the start."""
    from torch._dynamo.utils import counters

    model = load(arch, torch.bfloat16, compile=False)
    _, versions = publish(model)
    sampler = Sampler(model, num_pages=64, max_rows=32)
    sampler.warm_up()
    assert sampler._graphs is not None
    programs, graphs = counters["stats"]["unique_graphs"], set(sampler._graphs._graphs)
    assert programs > 0
    base = {key for key in graphs if not (key.tiles if isinstance(key, DecodeKey) else key.max_ranks)}
    assert sorted(key.rows for key in base if isinstance(key, DecodeKey)) == [8, 16, 32]
    assert sorted(key.tokens for key in base if isinstance(key, PrefillKey)) == list(token_buckets(8192))
    assert {key.lora_a_fused for key in graphs if isinstance(key, DecodeKey)} == {False, True}
    for count in (1, 9, 20):  # short enough for one KV split each
        sample(model, {f"base{n}": (None, prompt(n % 3)) for n in range(count)}, sampler=sampler)
        assert set(sampler._graphs._graphs) == graphs
    who: dict[str, tuple[Version | None, np.ndarray]] = {
        f"{name}{n}": (version, prompt(n)) for n in range(3) for name, version in versions.items()
    }
    sample(model, who, sampler=sampler)
    sample(model, {name: one for name, one in who.items() if not name.startswith("f")}, sampler=sampler)
    new = set(sampler._graphs._graphs) - graphs
    assert new, "wide adapters are not the usual ones"
    assert all(max(rank for rank, _ in key.tiles) > 32 for key in new if isinstance(key, DecodeKey))
    assert counters["stats"]["unique_graphs"] == programs


@pytest.mark.parametrize("compiled", [False, True])
def test_decode_steps_and_compiled_training_leave_each_other_alone(
    load: Callable[..., BaseModel], compiled: bool
) -> None:
    """Layers that are compiled for training: the same tokens as without, and no graph of training's is made again."""
    from torch._dynamo.utils import counters

    finished, graphs = [], []
    for for_training in (False, True):
        model = load("qwen3", compile=for_training)
        assert model.compiled is for_training
        harness, versions = publish(model)
        sampler = Sampler(model, num_pages=64, compile_decode=compiled)
        for length in (20, 33):
            who: dict[str, tuple[Version | None, np.ndarray]] = {name: (v, prompt(2)) for name, v in versions.items()}
            finished.append(sample(model, who, sampler=sampler, max_tokens=20)[0])
            before = counters["stats"]["unique_graphs"]
            datum = Datum(
                model_input=(EncodedText(tokens=np.arange(3, length, dtype=np.int32)),),
                loss_fn_inputs={"target_tokens": np.arange(4, length + 1, dtype=np.int64)},
            )
            harness.run(harness.command("a", datum))
            graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs == [0, 0, 0, 0]
    for other in finished[1:]:
        for name in RANKS:
            assert list(other.tokens[name, 0]) == list(finished[0].tokens[name, 0])


@pytest.mark.parametrize("ranks", [RANKS, FEW], ids=["apart", "fused"])
def test_neighbours_change_no_token(load: Callable[..., BaseModel], ranks: dict[str, int]) -> None:
    model = load("qwen3")
    _, versions = publish(model, ranks)
    who = {f"{name}{n}": (version, prompt(n)) for n in range(3) for name, version in versions.items()}
    together, _ = sample(model, who)
    for name in ("a0", "d1", "e2"):
        alone, _ = sample(model, {name: who[name]})
        assert list(alone.tokens[name, 0]) == list(together.tokens[name, 0])
        np.testing.assert_allclose(alone.logprobs[name, 0], together.logprobs[name, 0], atol=1e-4)


def test_a_step_ahead_of_new_weights_counts_as_the_old_ones(load: Callable[..., BaseModel]) -> None:
    """Its tokens are the old weights', although their row is overwritten before it is taken in."""
    new = Version(model_id="c", number=2)

    def moved_after(num_steps: int, *, ahead: bool) -> Finished:
        model, finished = load("qwen3"), Finished()
        harness, versions = publish(model, {"a": 16, "c": 4})  # "c" comes first, later last
        sampler, scheduler = Sampler(model, num_pages=64, compile_decode=False), make_scheduler(64)
        if not ahead:
            sampler._graphs.launch_ahead = lambda *_: None  # type: ignore
        for n in range(6):
            version = versions["a" if n % 2 else "c"]
            sampler.pin(version)
            scheduler.add(wanted(f"r{n}", version, prompt(0), max_tokens=40, seed=n, inflight=n % 2 == 0))
        for _ in range(num_steps):
            plan = scheduler.plan()
            assert plan is not None
            finished.take(scheduler.apply(plan, sampler.step(plan)))
        harness.create("later", 64, seed=9)
        model.bank.publish("later", new)
        sampler.pin(new, 3)
        scheduler.move(scheduler.followers(new), new)
        sampler.unpin(versions["c"], 3)
        row = model.bank.pin_version(versions["c"])
        model.bank.compute_slab(row.rank_bucket)[row.slot].fill_(torch.nan)
        return run(scheduler, sampler, finished)  # type: ignore[arg-type]

    finished, expected = moved_after(12, ahead=True), moved_after(13, ahead=False)
    assert len(set(expected.versions["r0", 0])) == 2
    assert finished.versions == expected.versions
    for key, tokens in expected.tokens.items():
        assert list(finished.tokens[key]) == list(tokens), key
        np.testing.assert_allclose(finished.logprobs[key], expected.logprobs[key], atol=1e-4)


@pytest.mark.parametrize("ranks", [RANKS, FEW], ids=["apart", "fused"])
def test_one_adapters_nan_reaches_no_other(load: Callable[..., BaseModel], ranks: dict[str, int]) -> None:
    model = load("qwen3")
    _, versions = publish(model, ranks)
    who: dict[str, tuple[Version | None, np.ndarray]] = {
        f"{name}{n}": (version, prompt(n)) for n in range(2) for name, version in versions.items()
    }
    who["base"] = (None, prompt(3))
    before, _ = sample(model, who)
    sampler = Sampler(model, num_pages=64, compile_decode=False)
    row = model.bank.row("c")
    model.bank.compute_slab(row.rank_bucket)[row.slot].fill_(torch.nan)
    model.bank.publish("c", Version(model_id="c", number=2))
    sane = {name: one for name, one in who.items() if not name.startswith("c")}
    broken = {name: (Version(model_id="c", number=2), one[1]) for name, one in who.items() if name.startswith("c")}
    # The second time, pages hold what the first left; the third, fused columns do.
    for together in (sane | broken, sane | broken, sane):
        after, _ = sample(model, together, sampler=sampler)
        for name in sane:
            assert list(after.tokens[name, 0]) == list(before.tokens[name, 0]), name


@pytest.mark.parametrize("compiled", [False, True])
def test_adapters_take_turns_in_the_fused_columns(load: Callable[..., BaseModel], compiled: bool) -> None:
    """All at once they do not fit; four at a time they do, in place of the four before."""
    model = load("qwen3")
    _, versions = publish(model, {f"n{number}": 32 for number in range(10)})
    who: dict[str, tuple[Version | None, np.ndarray]] = {
        f"{name}-{n}": (version, prompt(n)) for n in range(2) for name, version in versions.items()
    }
    together, _ = sample(model, who, compiled=compiled)
    sampler = Sampler(model, num_pages=64, compile_decode=compiled)
    for first in (0, 4, 2, 6, 0):
        names = [f"n{number}-{n}" for number in range(first, first + 4) for n in range(2)]
        found, _ = sample(model, {name: who[name] for name in names}, sampler=sampler)
        for name in names:
            assert list(found.tokens[name, 0]) == list(together.tokens[name, 0]), (first, name)
            np.testing.assert_allclose(found.logprobs[name, 0], together.logprobs[name, 0], atol=1e-4)
    assert sampler._graphs is not None
    assert all(key.lora_a_fused for key in sampler._graphs._graphs if isinstance(key, DecodeKey))


def test_graphs_follow_a_slab_that_has_grown(load: Callable[..., BaseModel]) -> None:
    """Where its memory is not mapped to addresses that stay."""
    model = load("llama")
    model.bank._pool._memory = Reallocation()
    harness, versions = publish(model, {"a": 8})
    sampler = Sampler(model, num_pages=64, compile_decode=False)
    who = {"x": (versions["a"], prompt(2))}
    before, _ = sample(model, who, sampler=sampler)
    at = model.bank.compute_slab(8).data_ptr()
    for number in range(40):
        harness.create(f"more{number}", 8, seed=number)
    assert model.bank.compute_slab(8).data_ptr() != at
    after, _ = sample(model, who, sampler=sampler)
    assert list(after.tokens["x", 0]) == list(before.tokens["x", 0])


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.5}])
def test_draws_equal_the_cpus(load: Callable[..., BaseModel], tmp_path: Path, params: dict[str, object]) -> None:
    model = load("llama")
    source = ModelSource(name="llama", directory=model.directory)
    cpu = load_model(source, device=torch.device("cpu"), dtype=torch.float32)
    who: dict[str, tuple[Version | None, np.ndarray]] = {f"base{n}": (None, prompt(n)) for n in range(5)}
    got, _ = sample(model, who, **params)
    want, _ = sample(cpu, who, **params)
    for name in who:
        assert list(got.tokens[name, 0]) == list(want.tokens[name, 0])
