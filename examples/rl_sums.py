"""Reinforcement learning with a reward that can be checked: short sums.

    descant serve smollm2                                                  # in one terminal
    python examples/rl_sums.py --base-url http://127.0.0.1:8000            # in another

Each step samples a group of answers to each of a few sums, rewards the right ones, and makes what was better than its
group's mean more likely: advantages relative to the group, ``importance_sampling`` against the log-probabilities
that the sampler reported.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from tinker import types

EXAMPLES = "1+2=3\n4+4=8\n"
MAX_TOKENS = 4

Progress = Callable[[int, int, float], None]
"""Called after each step with (steps done, steps in all, mean reward of the step's samples)."""


@dataclass(frozen=True)
class SumsResult:
    before: float
    after: float
    """Mean reward on sums that were held out, sampled with the model as it was and as it became."""
    rewards: tuple[float, ...]
    sample: tuple[str, str]
    """The same held-out sum answered before and after."""


@dataclass(frozen=True)
class Sum:
    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{EXAMPLES}{self.a}+{self.b}="

    def reward(self, answer: str) -> float:
        """1 for the sum, alone on its line."""
        return float(answer.partition("\n")[0].strip() == str(self.a + self.b))


def run(
    service_client: tinker.ServiceClient,
    *,
    base_model: str,
    num_steps: int = 15,
    groups: int = 6,
    group_size: int = 8,
    learning_rate: float = 3e-4,
    rank: int = 8,
    progress: Progress | None = None,
) -> SumsResult:
    training_client = service_client.create_lora_training_client(base_model, rank=rank, seed=2).result()
    tokenizer = training_client.get_tokenizer()
    adam = types.AdamParams(learning_rate=learning_rate, grad_clip_norm=1.0)
    draw = random.Random(0)
    sums = [Sum(a, b) for a in range(1, 10) for b in range(1, 10)]
    draw.shuffle(sums)
    held_out, training = sums[:12], sums[12:]

    sampling_client = training_client.save_weights_and_get_sampling_client().result()
    before, answer_before = evaluate(sampling_client, tokenizer, held_out)
    rewards: list[float] = []
    for step in range(num_steps):
        data: list[types.Datum] = []
        step_rewards: list[float] = []
        problems = draw.sample(training, groups)
        for problem, prompt, sequences in sample(sampling_client, tokenizer, problems, group_size):
            group = [problem.reward(tokenizer.decode(sequence.tokens)) for sequence in sequences]
            mean = sum(group) / len(group)
            step_rewards += group
            # A group that is all right or all wrong says nothing about which answer is better.
            data += [
                make_datum(prompt, sequence, reward - mean)
                for sequence, reward in zip(sequences, group, strict=True)
                if reward != mean
            ]
        if data:
            backward = training_client.forward_backward(data, "importance_sampling")
            update = training_client.optim_step(adam)
            backward.result()
            update.result()
            sampling_client = training_client.save_weights_and_get_sampling_client().result()
        rewards.append(sum(step_rewards) / len(step_rewards))
        if progress is not None:
            progress(step + 1, num_steps, rewards[-1])
    after, answer_after = evaluate(sampling_client, tokenizer, held_out)
    return SumsResult(before, after, tuple(rewards), (answer_before, answer_after))


def sample(
    sampling_client: tinker.SamplingClient, tokenizer: Any, problems: list[Sum], num_samples: int
) -> list[tuple[Sum, list[int], list[types.SampledSequence]]]:
    """All groups at once: the server batches them."""
    params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, stop=["\n"])
    prompts = [list(tokenizer.encode(problem.prompt, add_special_tokens=False)) for problem in problems]
    futures = [sampling_client.sample(types.ModelInput.from_ints(prompt), num_samples, params) for prompt in prompts]
    return [
        (problem, prompt, list(future.result().sequences))
        for problem, prompt, future in zip(problems, prompts, futures, strict=True)
    ]


def make_datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Prompt and answer as one sequence; only the answer's tokens have an advantage."""
    answer = list(sequence.tokens)
    ahead = len(prompt) - 1  # positions that predict a token of the prompt
    tokens = prompt + answer
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:], np.int64)),
            "logprobs": types.TensorData.from_numpy(np.array([0.0] * ahead + list(sequence.logprobs), np.float32)),
            "advantages": types.TensorData.from_numpy(np.array([0.0] * ahead + [advantage] * len(answer), np.float32)),
        },
    )


def evaluate(
    sampling_client: tinker.SamplingClient, tokenizer: Any, problems: list[Sum], num_samples: int = 4
) -> tuple[float, str]:
    """Mean reward over ``problems``, and the first answer to the first of them."""
    rewards: list[float] = []
    first = ""
    for problem, _, sequences in sample(sampling_client, tokenizer, problems, num_samples):
        answers = [tokenizer.decode(sequence.tokens) for sequence in sequences]
        first = first or f"{problem.a}+{problem.b}={answers[0].strip()}"
        rewards += [problem.reward(answer) for answer in answers]
    return sum(rewards) / len(rewards), first


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
        progress=lambda step, num_steps, reward: print(f"step {step}/{num_steps}  mean reward {reward:.2f}"),
    )
    print(f"\nheld-out sums: mean reward {result.before:.2f} before, {result.after:.2f} after")
    print(f"  before: {result.sample[0]!r}\n  after:  {result.sample[1]!r}")


if __name__ == "__main__":
    main()
