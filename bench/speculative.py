"""What speculative decoding buys: tokens per second and tokens a step with and without the n-gram drafter, the tokens
compared.

    python bench/speculative.py [--model smollm2] [--sequences 1 8] [--tokens 128] [--num-speculative-tokens 4]
                                [--rounds 3]

Two prompts, greedily continued: one that is repeated (a table of lines, twice and a half) and one that is not (prose).
With and without alternate in one process; the fastest of ``--rounds`` counts. ``tokens a step`` is over the steps of a
sequence that had a draft, its own token included.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from descant.model.base import BaseModel
from descant.model.load import load_model, resolve_model
from descant.sample.plan import SampleLimits
from descant.sample.runner import MAX_NUM_BATCHED_TOKENS, Sampler
from descant.sample.scheduler import Scheduler
from descant.sample.speculative import Drafter, NgramDrafter
from descant.types import EncodedText, SampleRequest, SamplingParams

NUM_PAGES = 512
NAMES = ("anchor", "basin", "cedar", "delta", "ember", "fjord")
TABLE = "".join(f"| {name} | {len(name) * 37} | {name[::-1]} |\n" for name in NAMES)
PROMPTS = {
    "repetitive": TABLE * 2 + TABLE[: len(TABLE) // 2],
    "prose": "The history of sailing begins long before anybody wrote about it. The first boats",
}


def run(
    model: BaseModel,
    sampler: Sampler,
    prompt: list[int],
    options: argparse.Namespace,
    num: int,
    drafter: Drafter | None,
) -> tuple[float, dict[str, int], list[list[int]]]:
    """Seconds of the steps after the prompts' prefill, the scheduler's counts, the tokens."""
    scheduler = Scheduler(
        SampleLimits(
            max_num_seqs=num,
            num_pages=NUM_PAGES,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_queued_requests=num,
            max_context_length=model.facts.max_context_length,
            vocab_size=model.facts.vocab_size,
            eos_token_ids=(),
            num_speculative_tokens=options.num_speculative_tokens,
        ),
        decode_text=lambda tokens: "",
        fresh_seed=lambda: 0,
        prefix_caching=False,
        drafter=drafter,
    )
    for number in range(num):
        params = SamplingParams(max_tokens=options.tokens, temperature=0.0, stop=())
        tokens = np.array(prompt[number % 8 :], np.int32)  # each a little different
        scheduler.add(
            SampleRequest(
                request_id=f"r{number}",
                version=None,
                prompt=(EncodedText(tokens=tokens),),
                num_samples=1,
                sampling_params=params,
            )
        )
    output: dict[str, list[int]] = {}
    seconds = 0.0
    first = True
    while (plan := scheduler.plan()) is not None:
        start = time.perf_counter()
        outputs = sampler.step(plan)
        for delta in scheduler.apply(plan, outputs):
            output[delta.request_id] = delta.tokens.tolist()
        if not first:
            seconds += time.perf_counter() - start
        first = False
    return seconds, scheduler.stats(), [output[f"r{number}"] for number in range(num)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    model = load_model(resolve_model(options.model), device=torch.device(options.device), check=False)
    sampler = Sampler(model, num_pages=NUM_PAGES)
    tokenizer = model.tokenizer()
    print(
        f"{options.model}, {model.dtype}, {options.device}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )
    for name, text in PROMPTS.items():
        prompt = tokenizer(text)["input_ids"]
        for num in options.sequences:
            best = {False: float("inf"), True: float("inf")}
            tokens: dict[bool, list[list[int]]] = {}
            for _ in range(options.rounds):
                for speculative in (False, True):
                    drafter = NgramDrafter() if speculative else None
                    seconds, stats, tokens[speculative] = run(model, sampler, prompt, options, num, drafter)
                    best[speculative] = min(best[speculative], seconds)
            rates = {speculative: num * (options.tokens - 1) / best[speculative] for speculative in best}
            steps, accepted, drafted = (stats[k] for k in ("drafted_steps", "accepted_tokens", "drafted_tokens"))
            print(
                f"{name}, {num} sequences: {rates[False]:.1f} tokens/s without, {rates[True]:.1f} with "
                f"({rates[True] / rates[False]:.2f}x); {accepted} of {drafted} draft tokens were accepted, "
                f"{1 + accepted / max(steps, 1):.2f} tokens a step in {steps} steps; "
                f"tokens {'equal' if tokens[True] == tokens[False] else 'DIFFER'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
