"""What is left in bfloat16 of small updates: the loss after a few steps, beside float32 and beside peft in bfloat16.

    python bench/small_updates.py [--device cuda] [--lr 1e-4] [--steps 6] [--tokens 192] [--rank 32] [--json FILE]

SmolLM2 on real text, all from the same adapter and by the same AdamW. ``value`` is how much the summed loss fell,
``baseline`` how much it falls in float32, ``ratio`` one over the other. The base's weights are bfloat16's in all of
them, so that float32 differs by the arithmetic alone. Where a base's product is rounded to bfloat16 before the
adapter's is added, as in peft, whatever is less than half a step of bfloat16 is lost at every token.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers
from workload import TEXT, device_name

from descant.model.base import BaseModel
from descant.model.load import load_model, resolve_model
from descant.testing.learner import LearnerHarness
from descant.types import AdamParams, Datum, EncodedText, Lora


def ours(model: BaseModel, tokens: torch.Tensor, options: argparse.Namespace) -> list[float]:
    """The loss before each step, and after the last."""
    harness = LearnerHarness(model)
    model.bank.create("a", Lora(rank=options.rank, seed=1))
    stream = tokens.numpy()
    arrays = {"target_tokens": stream[1:].astype(np.int64)}
    datum = Datum(model_input=(EncodedText(tokens=stream[:-1].astype(np.int32)),), loss_fn_inputs=arrays)
    losses = []
    for step in range(options.steps + 1):
        [output] = harness.run(harness.command("a", datum, forward_only=step == options.steps))
        losses.append(output.metrics["loss:sum"])
        if step < options.steps:
            harness.step("a", AdamParams(learning_rate=options.lr))
    return losses


def theirs(
    directory: Path, start: Mapping[str, torch.Tensor], tokens: torch.Tensor, options: argparse.Namespace
) -> list[float]:
    """A plain loop over peft's layers, the base in bfloat16, adapters in float32 as peft keeps them."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(options.device)
    sites = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in start}
    with warnings.catch_warnings(action="ignore"):  # that a tied head gets an adapter is wanted
        config = peft.LoraConfig(r=options.rank, lora_alpha=32, target_modules=sorted(sites), lora_dropout=0.0)
        model: Any = peft.get_peft_model(plain, config).eval()
    parameters = {
        name.replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(start[name])
    params = AdamParams(learning_rate=options.lr)
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    stream, losses = tokens.to(options.device), []
    for step in range(options.steps + 1):
        with torch.set_grad_enabled(step < options.steps):
            logits = model(input_ids=stream[None, :-1], use_cache=False).logits[0].float()
            loss = F.cross_entropy(logits, stream[1:], reduction="sum")
        losses.append(loss.item())
        if step < options.steps:
            optimizer.zero_grad()
            loss.backward()
            if params.grad_clip_norm > 0:
                torch.nn.utils.clip_grad_norm_(parameters.values(), params.grad_clip_norm)
            optimizer.step()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    device, source = torch.device(options.device), resolve_model("smollm2")
    found: dict[str, list[float]] = {}
    start: dict[str, torch.Tensor] = {}
    tokens = torch.empty(0)

    def show(name: str, losses: list[float]) -> None:
        found[name] = losses
        print(f"{name:16}", *(f"{loss:8.2f}" for loss in losses), flush=True)

    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model = load_model(source, device=device, dtype=dtype, check=False)
        if dtype == torch.float32:
            for parameter in model.network.parameters():
                parameter.data.copy_(parameter.data.bfloat16())  # as the others have them
            tokenizer: Any = model.tokenizer()
            tokens = torch.tensor(tokenizer(TEXT)["input_ids"][: options.tokens + 1])
            lora = Lora(rank=options.rank, seed=1)
            model.bank.create("start", lora)
            exported = model.bank.export(model.bank.weights("start"), lora)
            start = {key: tensor.clone().cpu() for key, tensor in exported.items()}
            model.bank.delete("start")
        show(name, ours(model, tokens, options))
        del model
    show("peft, bfloat16", theirs(source.directory, start, tokens, options))

    fell = {name: losses[0] - losses[-1] for name, losses in found.items()}
    rows = [
        {
            "id": "small_updates",
            "what": f"{name}: fall of the summed loss over {len(tokens) - 1} tokens in {options.steps} steps of "
            f"{options.lr:g}, rank {options.rank}; baseline: float32",
            "value": round(fell[name], 2),
            "unit": "nats",
            "baseline": round(fell["float32"], 2),
            "ratio": round(fell[name] / fell["float32"], 3),
            "losses": [round(loss, 2) for loss in found[name]],
            "device": device_name(device),
            "torch": torch.__version__,
        }
        for name in ("bfloat16", "peft, bfloat16")
    ]
    for row in rows:
        print(f"{row['what']}: {row['value']} {row['unit']}, baseline {row['baseline']}, ratio {row['ratio']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
