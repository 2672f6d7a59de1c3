"""The unmodified SDK against a real server on a CPU: a run has the same bits alone and among other people's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from descant.testing.server import END_S, serve
from descant.testing.tiny import tiny_model

ADAM = types.AdamParams(learning_rate=1e-4)
STEPS = 2
SHORT = "Three people share one model."
MINE = (
    "A descant is an independent melody that is sung above a tune which everybody knows.",
    "The adapter learns, the base stays as it is, and nobody hears who else is in the choir.",
    "Once more: the same words.",
)
THEIRS = (
    "It was a bright cold day in April, and the clocks were striking thirteen.",
    "Call me Ishmael.",
    "All happy families are alike; every unhappy family is unhappy in its own way, as the first line has it.",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")  # at exit the SDK would wait for a server that is gone


def datum(tokens: Sequence[int], *, advantage: float | None = None) -> types.Datum:
    inputs: dict[str, Any] = {"target_tokens": np.asarray(tokens[1:], np.int64)}
    if advantage is not None:
        inputs["logprobs"] = np.full(len(tokens) - 1, -3.0, np.float32)
        inputs["advantages"] = np.full(len(tokens) - 1, advantage, np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in inputs.items()},
    )


class Texts:
    def __init__(self, client: tinker.TrainingClient):
        self._tokenizer = client.get_tokenizer()

    def data(self, texts: Sequence[str], **fields: Any) -> list[types.Datum]:
        return [datum(self._tokenizer.encode(text), **fields) for text in texts]


def numbers(client: tinker.TrainingClient, data: list[types.Datum]) -> np.ndarray:
    outputs = client.forward(data, "cross_entropy").result(END_S).loss_fn_outputs
    return np.concatenate([output["logprobs"].to_numpy().ravel() for output in outputs])


@pytest.mark.parametrize(
    ("model", "dtype"), [("smollm2", "float32"), ("tiny", "bfloat16")], ids=["smollm2 float32", "tiny bfloat16"]
)
def test_a_run_has_the_same_bits_alone_and_beside_neighbours(model: str, dtype: str, tmp_path: Path) -> None:
    base = str(tiny_model("llama", tmp_path / "llama")) if model == "tiny" else model
    # Requests take several passes, and turns several requests.
    settings = (f"rank.dtype={dtype}", "rank.device=cpu", "train.microbatch_tokens=48", "sample.max_num_seqs=4")
    with (
        serve(Path(base), tmp_path / "data", *settings) as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-alice") as alice,
        tinker.ServiceClient(base_url=server.url, api_key="tml-bob") as bob,
    ):

        def mine() -> tinker.TrainingClient:
            return alice.create_lora_training_client(base, rank=8, seed=7).result(END_S)

        def sent(client: tinker.TrainingClient) -> list[Any]:
            """One step's, not waited for."""
            return [
                client.forward_backward(texts.data(MINE), "cross_entropy"),
                client.forward_backward(texts.data([SHORT]), "cross_entropy"),
                client.optim_step(ADAM),
            ]

        alone = mine()
        texts = Texts(alone)
        before = numbers(alone, texts.data(MINE))
        for _ in range(STEPS):
            for future in sent(alone):
                future.result(END_S)
        want = numbers(alone, texts.data(MINE))
        assert np.abs(want - before).max() > 0

        neighbours = [bob.create_lora_training_client(base, rank=rank, seed=rank).result(END_S) for rank in (32, 4)]
        among = mine()
        for _ in range(STEPS):
            first = neighbours[0].forward_backward(texts.data(THEIRS), "cross_entropy")
            second = neighbours[1].forward_backward(texts.data(THEIRS[:1], advantage=0.5), "importance_sampling")
            others = [first, second, *(neighbour.optim_step(ADAM) for neighbour in neighbours)]
            ours = sent(among)
            others.append(neighbours[1].forward(texts.data(THEIRS[1:]), "cross_entropy"))
            for future in (*ours, *others):
                future.result(END_S)
        assert np.array_equal(numbers(among, texts.data(MINE)), want)

        if dtype == "float32":  # the same datums as other requests: the last bits are others
            split = mine()
            for _ in range(STEPS):
                for text in (*MINE, SHORT):
                    split.forward_backward(texts.data([text]), "cross_entropy").result(END_S)
                split.optim_step(ADAM).result(END_S)
            np.testing.assert_allclose(numbers(split, texts.data(MINE)), want, rtol=0, atol=1e-4)
