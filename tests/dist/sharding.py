"""What the ranks of a sharded base do in the tests. Run in forks of a zygote; named ``tests.dist.sharding:NAME``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed.tensor import DTensor

from descant.dist.mesh import Mesh
from descant.dist.shard import shard_layers
from descant.model.load import ModelSource, load_model
from descant.sample.scheduler import SampleLimits, Scheduler
from descant.sample.step import Sampler
from descant.testing.engine import request
from descant.testing.gloo import Seat
from descant.testing.studio import Studio, datum, gspo_datum, some_commands

MODELS = ("a", "b", "c", "d", "e", "f")


def worked(studio: Studio) -> list[Any]:
    """Outputs, gradients and states of some training and sampling, as bytes: to the last bit."""
    for index, model_id in enumerate(MODELS):
        studio.create(model_id, 4 + 4 * index, seed=index, train_attn=index != 1, train_mlp=index > 1)
    made: list[Any] = []

    def keep(tensor: torch.Tensor) -> None:
        made.append(tensor.numpy().tobytes())

    for _ in range(2):
        for output in studio.run(*some_commands(studio, MODELS)):
            made.append(output.metrics["loss:sum"])
            made += [one["logprobs"].tobytes() for one in output.loss_fn_outputs]
        for model_id in MODELS:
            keep(studio.gradient(model_id))
            studio.step(model_id)
            for tensor in studio.state(model_id):
                keep(tensor)
        studio.run(studio.command("a", datum(7), forward_only=True))
    sampler = Sampler(studio.model, num_pages=8)
    limits = SampleLimits(
        max_running=4, num_pages=8, step_tokens=32, max_waiting=4, max_context_length=512,
        vocab_size=studio.model.facts.vocab_size, eos_token_ids=(),
    )  # fmt: skip
    scheduler = Scheduler(limits, decode_text=lambda tokens: "", fresh_seed=lambda: 0)
    for _ in range(2):
        scheduler.add(request(max_tokens=6, temperature=0.0))
    while (plan := scheduler.plan()) is not None:
        for delta in scheduler.apply(plan, sampler.step(plan)):
            made.append(delta.tokens.tolist())
            made.append(delta.logprobs.tobytes())
    studio.run(studio.command("a", gspo_datum(9), loss_fn="gspo"))
    keep(studio.gradient("a"))
    return made


def alike(seat: Seat, directory: str) -> dict[str, Any]:
    """The same work with all of the base here and with a part of it; then passes that only some ranks have."""
    source = ModelSource(name="tiny", directory=Path(directory))
    load = partial(load_model, source, device=torch.device("cpu"), dtype=torch.float32)
    whole = worked(Studio(load()))
    with seat.join() as member, Mesh.create(member, {"shard": list(range(seat.world))}, deadline_s=20) as mesh:

        def poison(*args: object, **kwargs: object) -> None:
            raise AssertionError("the default group was asked for")

        model = load(shard=lambda root, layers: shard_layers(root, layers, mesh.groups["shard"]))
        real = c10d._get_default_group
        c10d._get_default_group = poison  # type: ignore[assignment]
        try:
            sharded = worked(Studio(model))
            for backward in (True, False, True):
                if seat.rank == 0:
                    model.empty_pass(backward=backward)
                else:
                    with torch.set_grad_enabled(backward):
                        model.empty_pass(backward=backward)
            member.barrier("done")
        finally:
            c10d._get_default_group = real
        layers = [parameter for layer in model.layers for parameter in layer.parameters()]
        return {
            "equal": whole == sharded,
            "shards": all(isinstance(parameter, DTensor) for parameter in layers),
            "here": sum(parameter.to_local().numel() for parameter in layers),  # type: ignore[attr-defined]
            "all": sum(parameter.numel() for parameter in layers),
        }
