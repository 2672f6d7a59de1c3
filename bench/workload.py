"""Tenants to measure with: their adapters, their requests, and the ways to run these."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from descant.model.base import BaseModel
from descant.model.flops import FlopCounter
from descant.model.load import ModelSource, load_model
from descant.testing.shapes import shaped_model
from descant.train.passes import TorchPassRunner
from descant.train.requests import Learner
from descant.train.runner import Part
from descant.types import AdamParams, Datum, EncodedText, ForwardBackward, Lora

TEXT = """Once the lighthouse keeper had trimmed the wick and wound the clock, he sat down to write the day's entry in
the log. Wind south-west, force six; sea rough; visibility good until four, when a bank of fog came in from the Skerries
and stood off the point like a wall. Two fishing boats passed inside the reef, one of them the Mary Ellen with her
mizzen gone. No signals. He blotted the page, and because there was nobody else on the rock to talk to, he added a line
that the inspectors would not care for: the gulls have learned to open the bread bin. Then he took the lamp down the
stairs, counting them as he always did, and on the hundred and ninth he stopped. Somebody had been sitting there. On the
stone lay a crust, a feather, and a page torn from his own log, the one of the ninth of March, which he did not remember
writing: two columns of figures, added up wrong, and below them in his own hand the words, ask the boy about the boats.
There had been no boy on the rock for eleven years. He read it twice, put it into his pocket, and went on down."""


def load_shape(
    shape: str,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    compile: bool | None = None,
    keep: Path | None = None,
) -> BaseModel:
    """A model of this shape with random weights. ``keep``: a directory to leave its files in."""
    overrides = {} if layers is None else {"num_hidden_layers": layers}
    with tempfile.TemporaryDirectory() as directory:
        path = shaped_model(shape, keep or Path(directory), device=device, dtype=dtype, **overrides)
        source = ModelSource(name=shape, directory=path)
        return load_model(source, device=device, dtype=dtype, check=False, compile=compile)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


class Tenants:
    """One adapter a row of ``lengths``: the tokens of each of its datums. Ranks and losses go round."""

    def __init__(
        self,
        model: BaseModel,
        lengths: Sequence[Sequence[int]],
        *,
        ranks: Sequence[int] = (16,),
        losses: Sequence[str] = ("cross_entropy",),
        train_unembed: bool = True,
    ):
        self.model, self.learner, self.lengths = model, Learner(TorchPassRunner(model)), lengths
        random = np.random.default_rng(0)
        self.commands: list[ForwardBackward] = []
        self.loras = []
        for number, sizes in enumerate(lengths):
            name, loss = f"tenant-{id(self)}-{number}", losses[number % len(losses)]
            lora = Lora(rank=ranks[number % len(ranks)], seed=number, train_unembed=train_unembed)
            model.bank.create(name, lora)
            self.loras.append(lora)
            data = tuple(self._datum(random, size, loss) for size in sizes)
            self.commands.append(ForwardBackward(model_id=name, seq_id=1, data=data, loss_fn=loss))

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.lengths))

    def flops(self) -> float:
        flop_counter = FlopCounter.of(self.model)
        adapters = sum(flop_counter.lora_params(lora) * sum(sizes) for lora, sizes in zip(self.loras, self.lengths))
        squares = sum(size * size for sizes in self.lengths for size in sizes)
        return flop_counter.flops(self.tokens, adapters, squares, backward=True)

    def _datum(self, random: np.random.Generator, length: int, loss: str) -> Datum:
        stream = random.integers(0, self.model.facts.vocab_size, length + 1)
        arrays = {"target_tokens": stream[1:].astype(np.int64)}
        if loss != "cross_entropy":
            arrays["logprobs"] = np.full(length, -np.log(self.model.facts.vocab_size), np.float32)
            arrays["advantages"] = np.full(length, random.normal(), np.float32)
        if loss == "gspo":
            arrays["sequence_ratio_mask"] = np.ones(length, np.float32)
        return Datum(model_input=(EncodedText(tokens=stream[:-1].astype(np.int32)),), loss_fn_inputs=arrays)

    def packed(self) -> None:
        """All in one pass."""
        requests = [self.learner.open(command) for command in self.commands]
        self.learner.run(
            [Part(request=r, datum=i) for r, c in zip(requests, self.commands) for i in range(len(c.data))]
        )
        for request in requests:
            self.learner.close(request)

    def in_passes(self, tokens: int) -> None:
        """Requests of several passes, each of so many tokens: the device need not wait between them."""
        requests = [self.learner.open(command) for command in self.commands]
        parts: list[Part] = []
        room = tokens
        for request, sizes in zip(requests, self.lengths, strict=True):
            for index, size in enumerate(sizes):
                if parts and size > room:
                    self.learner.run(parts)
                    parts, room = [], tokens
                parts.append(Part(request=request, datum=index))
                room -= size
        self.learner.run(parts)
        for request in requests:
            self.learner.close(request)

    def one_adapter_a_pass(self) -> None:
        for command in self.commands:
            request = self.learner.open(command)
            self.learner.run([Part(request=request, datum=i) for i in range(len(command.data))])
            self.learner.close(request)

    def step(self) -> None:
        params = AdamParams(learning_rate=1e-5)
        for outcome in self.learner.optim_steps([(command.model_id, params) for command in self.commands]):
            if isinstance(outcome, Exception):
                raise outcome

    def clear(self) -> None:
        for command in self.commands:
            self.model.bank.gradient(command.model_id).zero_()
            self.model.bank[command.model_id].gradient_free = True

    def delete(self) -> None:
        for command in self.commands:
            self.model.bank.delete(command.model_id)
