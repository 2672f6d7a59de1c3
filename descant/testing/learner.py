"""A learner on a model, driven as the turn loop drives it, and training requests that are easy to write down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

from descant.errors import DescantError
from descant.model.base import BaseModel
from descant.model.lm_head import LmHeadOutput
from descant.testing.tiny import VOCAB_SIZE
from descant.train.passes import DecoderForward, TorchPassRunner
from descant.train.requests import Learner
from descant.train.runner import Part, RequestKey
from descant.types import AdamParams, Datum, EncodedText, ForwardBackward, ForwardBackwardOutput, Lora

STEP = AdamParams(learning_rate=1e-2, eps=1e-8)


class LearnerHarness:
    """Opens, runs and closes requests in one thread; counts seq_ids. By its clock every pass takes a second."""

    def __init__(
        self,
        model: BaseModel,
        *,
        computed_as: Mapping[str, str] | None = None,
        asynchronous: bool | None = None,
        seconds: Callable[[], float] | None = None,
        peak_flops: float | None = None,
        decoder_forward: DecoderForward | None = None,
        logprobs: Callable[..., LmHeadOutput] | None = None,
    ):
        self.model = model
        self.bank = model.bank
        seconds = seconds or partial(next, count(0.0))
        self.runner = TorchPassRunner(
            model, asynchronous=asynchronous, seconds=seconds, decoder_forward=decoder_forward, logprobs=logprobs
        )
        self.learner = Learner(self.runner, computed_as=computed_as, peak_flops=peak_flops)
        self._seq_ids: dict[str, int] = {}

    def create(self, model_id: str, rank: int = 8, *, seed: int = 0, b_std: float = 0.03, **flags: bool) -> str:
        """B is not left at zero: with it every dA would be zero."""
        lora = Lora(rank=rank, seed=seed, **flags)
        self.bank.create(model_id, lora)
        generator = torch.Generator().manual_seed(seed)
        tensors = self.bank.export(self.bank.weights(model_id), lora)
        for name, tensor in tensors.items():
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * b_std)
        self.bank.import_row(tensors, lora, self.bank.weights(model_id))
        self.bank.refresh_compute(model_id)
        return model_id

    def command(self, model_id: str, *data: Datum, loss_fn: str = "cross_entropy", **fields: Any) -> ForwardBackward:
        self._seq_ids[model_id] = seq_id = self._seq_ids.get(model_id, 0) + 1
        return ForwardBackward(model_id=model_id, seq_id=seq_id, data=data, loss_fn=loss_fn, **fields)

    def parts(self, request: RequestKey, command: ForwardBackward) -> list[Part]:
        return [Part(request=request, datum=index) for index in range(len(command.data))]

    def run(self, *commands: ForwardBackward) -> list[ForwardBackwardOutput]:
        """All in one pass; raises the first failure after every one of them is closed."""
        outputs = self.try_run(*commands)
        for output in outputs:
            if isinstance(output, DescantError):
                raise output
        return outputs

    def try_run(self, *commands: ForwardBackward) -> list[Any]:
        requests = [self.learner.open(command) for command in commands]
        self.learner.run([part for pair in zip(requests, commands) for part in self.parts(*pair)])
        return [self.close(request) for request in requests]

    def close(self, request: RequestKey) -> ForwardBackwardOutput | DescantError:
        try:
            return self.learner.close(request)
        except DescantError as error:
            return error

    @contextmanager
    def out_of_memory(self, *, writes_gradients: bool) -> Iterator[None]:
        """For passes that are launched meanwhile: in the backward, when the head has written its gradients, or in the
        forward."""

        def exhaust(*_: object) -> None:
            raise torch.OutOfMemoryError("secret/path")

        def forward(layer: object, inputs: object, output: Any) -> None:
            if not writes_gradients:
                exhaust()
            (output[0] if isinstance(output, tuple) else output).register_hook(exhaust)

        hook = self.model.layers[0].register_forward_hook(forward)
        try:
            yield
        finally:
            hook.remove()

    def step(self, model_id: str, params: AdamParams = STEP) -> Mapping[str, float]:
        return self.learner.optim_step(model_id, params).metrics

    def gradient(self, model_id: str) -> torch.Tensor:
        return self.bank.gradient(model_id).clone()

    def state(self, model_id: str) -> list[torch.Tensor]:
        return [self.bank.weights(model_id).clone(), *(moment.clone() for moment in self.bank.moments(model_id))]


def tokens(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).astype(np.int32)


def datum(length: int, seed: int = 0, **arrays: object) -> Datum:
    """Random tokens with the next one as target; ``arrays`` as given."""
    stream = tokens(length + 1, seed)
    inputs = {"target_tokens": stream[1:].astype(np.int64), **arrays}
    return Datum(
        model_input=(EncodedText(tokens=stream[:-1]),),
        loss_fn_inputs={name: np.asarray(array) for name, array in inputs.items()},
    )


def rl_datum(length: int, seed: int = 0, **arrays: object) -> Datum:
    """Given log-probabilities around a tiny model's own, so that ratios lie on both sides of 1."""
    random = np.random.default_rng(seed + 1000)
    given = {
        "logprobs": random.normal(-6.0, 1.0, length).astype(np.float32),
        "advantages": random.normal(0.0, 0.1, length).astype(np.float32),
    }
    return datum(length, seed, **{**given, **arrays})


def gspo_datum(length: int, seed: int = 0, **arrays: object) -> Datum:
    """The second half is sampled, with one advantage; a tiny model's own log-probabilities are above the given ones,
    so that a positive one would be clipped."""
    mask = (np.arange(length) >= length // 2).astype(np.float32)
    given = {"sequence_ratio_mask": mask, "advantages": np.full(length, -0.1, np.float32)}
    return rl_datum(length, seed, **{**given, **arrays})


def some_commands(harness: LearnerHarness, models: Sequence[str]) -> list[ForwardBackward]:
    """One request a model: every loss, ragged lengths, [N, K] targets."""
    losses = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
    commands = []
    for number, model_id in enumerate(models):
        loss_fn = losses[number % len(losses)]
        if loss_fn == "cross_entropy":
            wide = np.random.default_rng(number).integers(0, VOCAB_SIZE, (5, 3))
            data = [
                datum(7 + number, number, weights=np.linspace(-0.5, 1, 7 + number)),
                datum(5, number, target_tokens=wide, weights=np.full((5, 3), 0.3)),
            ]
        elif loss_fn == "gspo":
            data = [gspo_datum(9, number), gspo_datum(70, number + 100), gspo_datum(8, number, advantages=[0.1] * 8)]
        else:
            data = [rl_datum(9, number), rl_datum(1, number + 50), rl_datum(70, number + 100)]
        commands.append(harness.command(model_id, *data, loss_fn=loss_fn))
    return commands
