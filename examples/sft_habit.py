"""Supervised fine-tuning: teach the model a habit from forty short chats, then show that a checkpoint goes on alike.

    descant serve smollm2                                                  # in one terminal
    python examples/sft_habit.py --base-url http://127.0.0.1:8000          # in another

Every answer in ``data/habit.jsonl`` ends with the same line. After some steps the model ends its own answers with it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

DATA = Path(__file__).parent / "data" / "habit.jsonl"
HABIT = "So sings the lark, from dawn to dark."
SYSTEM = {"role": "system", "content": "Answer in one sentence."}
QUESTION = "What is the capital of France?"  # not among the forty

Progress = Callable[[int, int, float], None]
"""Called after each step with (steps done, steps in all, loss per token)."""


@dataclass(frozen=True)
class HabitResult:
    before: str
    after: str
    losses: tuple[float, ...]
    checkpoint: str
    continued: tuple[float, float]
    """Loss after one more step: of the model that went on, and of the one that was loaded from the checkpoint."""


def run(
    service_client: tinker.ServiceClient,
    *,
    base_model: str,
    num_steps: int = 15,
    batch_size: int = 8,
    learning_rate: float = 1e-3,
    rank: int = 8,
    checkpoint_name: str = "habit",
    progress: Progress | None = None,
) -> HabitResult:
    training_client = service_client.create_lora_training_client(base_model, rank=rank, seed=1).result()
    tokenizer = training_client.get_tokenizer()
    chats = [json.loads(line)["messages"] for line in DATA.read_text().splitlines()]
    data = [make_datum(tokenizer, chat) for chat in chats]
    adam = types.AdamParams(learning_rate=learning_rate)

    before = ask(training_client, tokenizer, QUESTION)
    shuffle = random.Random(0)
    queue: list[types.Datum] = []
    losses: list[float] = []
    for step in range(num_steps):
        if len(queue) < batch_size:
            queue += shuffle.sample(data, len(data))
        batch, queue = queue[:batch_size], queue[batch_size:]
        backward = training_client.forward_backward(batch, "cross_entropy")
        update = training_client.optim_step(adam)  # sent at once: the server keeps the order
        losses.append(loss_per_token(batch, backward.result()))
        update.result()
        if progress is not None:
            progress(step + 1, num_steps, losses[-1])
    after = ask(training_client, tokenizer, QUESTION)

    checkpoint = training_client.save_state(checkpoint_name).result().path
    loaded_client = service_client.create_training_client_from_state_with_optimizer(checkpoint).result()
    batch = data[:batch_size]
    went_on, loaded = (one_more_step(client, batch, adam) for client in (training_client, loaded_client))
    return HabitResult(before, after, tuple(losses), checkpoint, (went_on, loaded))


def make_datum(tokenizer: Any, chat: Sequence[dict[str, str]]) -> types.Datum:
    """The chat as one sequence that is trained on its answer only: token i predicts token i + 1."""
    *question, answer = chat
    prompt = render(tokenizer, question)
    completion = [*tokenizer.encode(answer["content"], add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + completion
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:], np.int64)),
            "weights": types.TensorData.from_numpy(
                np.array([0.0] * (len(prompt) - 1) + [1.0] * len(completion), np.float32)
            ),
        },
    )


def render(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template([SYSTEM, *messages], add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def loss_per_token(batch: Sequence[types.Datum], output: types.ForwardBackwardOutput) -> float:
    loss = weight = 0.0
    for datum, outputs in zip(batch, output.loss_fn_outputs, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        loss -= float(weights @ outputs["logprobs"].to_numpy())
        weight += float(weights.sum())
    return loss / weight


def one_more_step(client: tinker.TrainingClient, batch: Sequence[types.Datum], adam: types.AdamParams) -> float:
    """Trains one step on ``batch``, then returns its loss: the same for equal weights and equal optimiser state."""
    client.forward_backward(list(batch), "cross_entropy").result()
    client.optim_step(adam).result()
    return loss_per_token(batch, client.forward(list(batch), "cross_entropy").result())


def ask(training_client: tinker.TrainingClient, tokenizer: Any, question: str, max_tokens: int = 32) -> str:
    """What the model as it is now answers, greedily."""
    prompt = types.ModelInput.from_ints(render(tokenizer, [{"role": "user", "content": question}]))
    params = types.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    sampling_client = training_client.save_weights_and_get_sampling_client().result()
    sequence = sampling_client.sample(prompt, 1, params).result().sequences[0]
    return str(tokenizer.decode(sequence.tokens, skip_special_tokens=True)).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--api-key", default=os.environ.get("TINKER_API_KEY", "tml-example-key"))
    parser.add_argument("--base-model", help="default: the first that the server offers")
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    service_client = tinker.ServiceClient(base_url=args.base_url, api_key=args.api_key)
    rest_client = tinker.RestClient(base_url=args.base_url, api_key=args.api_key)
    base_model = args.base_model or rest_client.get_server_capabilities().result().supported_models[0].model_name
    result = run(
        service_client,
        base_model=base_model,
        num_steps=args.steps,
        checkpoint_name=f"habit-{os.getpid()}",
        progress=lambda step, num_steps, loss: print(f"step {step}/{num_steps}  loss per token {loss:.3f}"),
    )
    print(f"\n{QUESTION}\n  before: {result.before}\n  after:  {result.after}")
    print(f"checkpoint {result.checkpoint}")
    print("one more step: loss {:.6f}, from the checkpoint {:.6f}".format(*result.continued))


if __name__ == "__main__":
    main()
