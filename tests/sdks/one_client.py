"""What every SDK can do that is served, in words that all of them know: run in an environment of one (``test_sdks``).

    python one_client.py URL MODEL

Prints the version and the losses before and after a step, and what was sampled; or the version and why it was refused.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tinker
from tinker import types


def client(made: Any) -> Any:
    """A client, which newer SDKs make a future of."""
    return made.result() if hasattr(made, "result") else made


def main(url: str, model: str) -> dict[str, Any]:
    told: dict[str, Any] = {"version": tinker.__version__}
    try:
        service = tinker.ServiceClient(base_url=url, api_key="tml-sdk")
        training = client(service.create_lora_training_client(base_model=model, rank=4, seed=0))
    except tinker.BadRequestError as error:
        return {**told, "refused": str(error)}
    tokens = [5, 6, 7, 8]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[3]),
            "weights": types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3]),
        },
    )
    losses = []
    for _ in range(2):
        losses.append(training.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"])
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = training.save_state("state").result().path
    sampling = client(training.save_weights_and_get_sampling_client("sampler"))
    prompt, params = types.ModelInput.from_ints(tokens), types.SamplingParams(max_tokens=3, stop=[])
    sequences = sampling.sample(prompt, 2, params).result().sequences
    return {**told, "losses": losses, "path": path, "sampled": [len(sequence.tokens) for sequence in sequences]}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
    os._exit(0)  # some of them wait for their threads for a long time
