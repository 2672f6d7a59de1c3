"""What the ranks of a sharded base do in the tests, in forks of a zygote: ``tests.distributed.sharding:NAME``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed.tensor import DTensor

from descant.distributed.fsdp import shard_layers
from descant.distributed.mesh import Mesh
from descant.model.load import ModelSource, load_model
from descant.sample.plan import SampleLimits
from descant.sample.runner import Sampler
from descant.sample.scheduler import Scheduler
from descant.testing.engine import request
from descant.testing.gloo import RankContext
from descant.testing.learner import LearnerHarness, datum, gspo_datum, some_commands

MODELS = ("a", "b", "c", "d", "e", "f")


def worked(harness: LearnerHarness) -> list[Any]:
    """Outputs, gradients and states of some training and sampling, as bytes: to the last bit."""
    for index, model_id in enumerate(MODELS):
        harness.create(model_id, 4 + 4 * index, seed=index, train_attn=index != 1, train_mlp=index > 1)
    made: list[Any] = []

    def keep(tensor: torch.Tensor) -> None:
        made.append(tensor.numpy().tobytes())

    for _ in range(2):
        for output in harness.run(*some_commands(harness, MODELS)):
            made.append(output.metrics["loss:sum"])
            made += [one["logprobs"].tobytes() for one in output.loss_fn_outputs]
        for model_id in MODELS:
            keep(harness.gradient(model_id))
            harness.step(model_id)
            for tensor in harness.state(model_id):
                keep(tensor)
        harness.run(harness.command("a", datum(7), forward_only=True))
    sampler = Sampler(harness.model, num_pages=8)
    limits = SampleLimits(
        max_num_seqs=4, num_pages=8, max_num_batched_tokens=32, max_queued_requests=4, max_context_length=512,
        vocab_size=harness.model.facts.vocab_size, eos_token_ids=(),
    )  # fmt: skip
    scheduler = Scheduler(limits, decode_text=lambda tokens: "", fresh_seed=lambda: 0)
    for _ in range(2):
        scheduler.add(request(max_tokens=6, temperature=0.0))
    while (plan := scheduler.plan()) is not None:
        for delta in scheduler.apply(plan, sampler.step(plan)):
            made.append(delta.tokens.tolist())
            made.append(delta.logprobs.tobytes())
    harness.run(harness.command("a", gspo_datum(9), loss_fn="gspo"))
    keep(harness.gradient("a"))
    return made


def alike(context: RankContext, directory: str) -> dict[str, Any]:
    """The same work with all of the base here and with a part of it; then passes that only some ranks have."""
    source = ModelSource(name="tiny", directory=Path(directory))
    load = partial(load_model, source, device=torch.device("cpu"), dtype=torch.float32)
    whole = worked(LearnerHarness(load()))
    with context.join() as member, Mesh.create(member, {"shard": list(range(context.world))}, deadline_s=20) as mesh:

        def poison(*args: object, **kwargs: object) -> None:
            raise AssertionError("the default group was asked for")

        model = load(shard=lambda root, layers: shard_layers(root, layers, mesh.groups["shard"]))
        real = c10d._get_default_group
        c10d._get_default_group = poison  # type: ignore[assignment]
        try:
            sharded = worked(LearnerHarness(model))
            for backward in (True, False, True):
                if context.rank == 0:
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
