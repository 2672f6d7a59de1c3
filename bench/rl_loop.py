"""Eight clients' RL loop through ``descant serve``, against eight adapters in turn with transformers + peft.

    python bench/rl_loop.py [--clients 8] [--peft-clients 2] [--samples 4] [--tokens 16] [--steps 2] [--rounds 3]
                            [--dtype bfloat16] [--shape smollm2 | DIRECTORY] [--set KEY=VALUE] [--json FILE] [NAME ...]

    rl      each client samples, trains on it (``importance_sampling``, rank 16) and publishes, ``--steps`` times, out
            of step with the others; peft does the same steps, one adapter after the other: ``set_adapter``,
            ``generate``, backward, AdamW
    train   one client's ``forward_backward`` and ``optim_step``, 8 × 128 tokens, rank 8; peft on the same batch

Real weights, and all through the public SDK. Both sides have the machine to themselves in turn: peft, server, peft, and
so on; a ratio is peft's seconds (the mean of before and after) by the server's, and a row has the median of the rounds.
``cpu_ratio`` is that of processor seconds, all of the server's, its ranks' and the clients' against peft's: on a
machine that others use too it says more. As peft goes from adapter to adapter, it makes the steps of ``--peft-clients``
of them only, and its seconds count for all. It keeps its adapters in float32, samples exactly ``--tokens`` too, and
takes its log-probabilities of now for those of then, which saves it a pass. Adapters leave the unembedding alone, as
peft's do.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from load import cpu_seconds, rank_processes

from descant.demo import running_server
from descant.errors import DescantError

LONGEST_WAIT_S = 600.0
LEARNING_RATE = 1e-5
RL_RANK, TRAIN_RANK, TRAIN_SHAPE = 16, 8, (8, 128)

Prompts = list[list[list[int]]]
"""By step and client."""


def prompts_of(text: Sequence[int], options: argparse.Namespace, number: int) -> Prompts:
    random = np.random.default_rng(number)

    def cut() -> list[int]:
        start, length = int(random.integers(len(text))), int(random.integers(8, 48))
        return [text[(start + i) % len(text)] for i in range(length)]

    return [[cut() for _ in range(options.clients)] for _ in range(options.steps)]


def batch_of(text: Sequence[int]) -> list[list[int]]:
    count, length = TRAIN_SHAPE
    return [[text[(7 * row + i) % len(text)] for i in range(length + 1)] for row in range(count)]


def advantages_of(prompt: Sequence[int], count: int) -> np.ndarray:
    found = np.random.default_rng(list(prompt)).normal(size=count)
    return found - found.mean()


# --------------------------------------------------------------------------------------------------------------------
# transformers + peft, in a process of its own


class Peft:
    def __init__(self, directory: str, options: argparse.Namespace):
        import peft
        import torch
        import transformers

        plain: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, options.dtype))
        self.options, self.torch = options, torch
        self.model: Any = None
        self.optimizers: dict[str, Any] = {}
        for name, rank in [("alone", TRAIN_RANK), *((f"a{n}", RL_RANK) for n in range(options.peft_clients))]:
            config = peft.LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
            if self.model is None:
                self.model = peft.get_peft_model(plain.eval(), config, adapter_name=name)
            else:
                self.model.add_adapter(name, config)
            self.model.set_adapter(name)
            weights = [weight for weight in self.model.parameters() if weight.requires_grad]
            self.optimizers[name] = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)

    def run(self, name: str, work: Any) -> tuple[float, float]:
        """Seconds, and processor seconds."""
        began, used = time.perf_counter(), time.process_time()
        if name == "rl":
            for prompts in work:
                for client, prompt in enumerate(prompts):
                    self._rl_step(f"a{client}", prompt)
        else:
            self._train_step(work)
        return time.perf_counter() - began, time.process_time() - used

    def _rl_step(self, adapter: str, prompt: Sequence[int]) -> None:
        torch, options = self.torch, self.options
        self.model.set_adapter(adapter)
        prompts = torch.tensor([prompt] * options.samples)
        with torch.no_grad():
            tokens = self.model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                max_new_tokens=options.tokens,
                min_new_tokens=options.tokens,
                pad_token_id=0,
            )
        logits = self.model(input_ids=tokens[:, :-1]).logits[:, len(prompt) - 1 :].float()
        logprobs = logits.log_softmax(-1).gather(2, tokens[:, len(prompt) :, None])[..., 0]
        advantages = torch.tensor(advantages_of(prompt, options.samples), dtype=torch.float32)
        (-(logprobs - logprobs.detach()).exp() * advantages[:, None]).sum().backward()
        self._step(adapter)

    def _train_step(self, batch: Sequence[Sequence[int]]) -> None:
        torch = self.torch
        self.model.set_adapter("alone")
        tokens = torch.tensor(batch)
        logits = self.model(input_ids=tokens[:, :-1]).logits.float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
        self._step("alone")

    def _step(self, adapter: str) -> None:
        self.optimizers[adapter].step()
        self.optimizers[adapter].zero_grad()


def run_peft(connection: Connection, options: argparse.Namespace) -> None:
    """Sends the directory and the text's tokens; then the seconds of whatever it is sent."""
    from descant.ranks.rank_main import rank_environment

    os.environ.update(rank_environment({}))  # before torch is there: its threads wait as a rank's do
    import transformers
    from workload import TEXT

    from descant.model.load import resolve_model

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    directory = str(resolve_model(options.shape).directory)
    text = transformers.AutoTokenizer.from_pretrained(directory)(TEXT, add_special_tokens=False)["input_ids"]
    connection.send((directory, text))
    peft = Peft(directory, options)
    try:
        while True:
            connection.send(peft.run(*connection.recv()))
    except EOFError:
        pass


# --------------------------------------------------------------------------------------------------------------------
# The clients


class Client:
    def __init__(self, url: str, number: int, rank: int):
        import tinker

        account: Any = {"base_url": url, "api_key": f"tml-rl-loop-{number:04}"}
        capabilities = tinker.RestClient(**account).get_server_capabilities().result(LONGEST_WAIT_S)
        base: Any = capabilities.supported_models[0].model_name
        service = tinker.ServiceClient(**account)
        creating = service.create_lora_training_client(base, rank=rank, seed=number, train_unembed=False)
        self.training = creating.result(LONGEST_WAIT_S)
        self.sampling = self.training.save_weights_and_get_sampling_client().result(LONGEST_WAIT_S)

    def rl_steps(self, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> None:
        from tinker import types

        params = types.SamplingParams(max_tokens=options.tokens, temperature=1.0, stop=[])
        for prompt in prompts:
            sampled = self.sampling.sample(types.ModelInput.from_ints(list(prompt)), options.samples, params)
            data, ahead = [], len(prompt) - 1
            advantages = advantages_of(prompt, options.samples)
            for sequence, advantage in zip(sampled.result(LONGEST_WAIT_S).sequences, advantages, strict=True):
                tokens = list(sequence.tokens)
                if len(tokens) != options.tokens:
                    raise RuntimeError(f"a sample of {len(tokens)} tokens, expected {options.tokens}")
                inputs: dict[str, np.ndarray] = {
                    "target_tokens": np.array([*prompt, *tokens][1:], np.int64),
                    "logprobs": np.array([*[0.0] * ahead, *(sequence.logprobs or [])], np.float32),
                    "advantages": np.array([*[0.0] * ahead, *[advantage] * len(tokens)], np.float32),
                }
                data.append(datum([*prompt, *tokens][:-1], inputs))
            self.train(data, "importance_sampling")
            self.sampling = self.training.save_weights_and_get_sampling_client().result(LONGEST_WAIT_S)

    def train(self, data: Sequence[Any], loss: str) -> None:
        from tinker import types

        backward = self.training.forward_backward(list(data), loss)  # type: ignore[arg-type]
        update = self.training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
        if not math.isfinite(backward.result(LONGEST_WAIT_S).metrics["loss:sum"]):
            raise RuntimeError("a loss that is not finite")
        update.result(LONGEST_WAIT_S)


def datum(tokens: Sequence[int], inputs: dict[str, np.ndarray]) -> Any:
    from tinker import types

    tensors = {name: types.TensorData.from_numpy(array) for name, array in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=tensors)


# --------------------------------------------------------------------------------------------------------------------
# The measurement


class Bench:
    def __init__(self, stack: ExitStack, options: argparse.Namespace):
        self.options = options
        context = multiprocessing.get_context("spawn")
        self._peft, theirs = context.Pipe()
        process = context.Process(target=run_peft, args=(theirs, options), daemon=True)
        process.start()
        stack.callback(process.kill)
        directory, self.text = self._answer()
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="descant-rl-"))
        settings = [f"rank.dtype={options.dtype}", *options.set]
        server = stack.enter_context(running_server(directory, Path(scratch), settings))
        self._url, self._processes = server.url, [os.getpid(), server.pid, *rank_processes(server.pid)]
        self._pool = stack.enter_context(ThreadPoolExecutor(options.clients))
        self._train: Client | None = None
        self._rl: list[Client] = []

    def _answer(self) -> Any:
        if not self._peft.poll(LONGEST_WAIT_S):
            raise RuntimeError(f"no answer of peft's process after {LONGEST_WAIT_S:.0f} s")
        return self._peft.recv()

    def _theirs(self, name: str, work: Any) -> np.ndarray:
        """Seconds, and processor seconds."""
        if name == "train":
            self._peft.send((name, work))
            return np.array(self._answer())
        self._peft.send((name, [prompts[: self.options.peft_clients] for prompts in work]))
        return np.array(self._answer()) * self.options.clients / self.options.peft_clients

    def _ours(self, run: Callable[[Any], object], work: Any) -> np.ndarray:
        began, used = time.perf_counter(), cpu_seconds(self._processes)
        run(work)
        return np.array([time.perf_counter() - began, cpu_seconds(self._processes) - used])

    def _alternate(self, name: str, works: Sequence[Any], run: Callable[[Any], object]) -> dict[str, Any]:
        """The first work only warms up."""
        self._ours(run, works[0])
        self._theirs(name, works[0][:1])
        theirs, ours = [self._theirs(name, works[1])], []
        for work in works[1:]:
            ours.append(self._ours(run, work))
            theirs.append(self._theirs(name, work))
        ratios = [(before + after) / 2 / own for before, after, own in zip(theirs, theirs[1:], ours)]
        seconds, cpu = np.median(ours, axis=0).tolist()
        ratio, cpu_ratio = np.median(ratios, axis=0).tolist()
        baseline, baseline_cpu = np.median(theirs, axis=0).tolist()
        row = {"value": seconds, "baseline": baseline, "ratio": ratio}
        row |= {"cpu": cpu, "baseline_cpu": baseline_cpu, "cpu_ratio": cpu_ratio}
        return {"id": name, "unit": "s", **{key: round(value, 2) for key, value in row.items()}}

    def rl(self) -> dict[str, Any]:
        options = self.options
        self._rl = list(self._pool.map(lambda n: Client(self._url, n, RL_RANK), range(options.clients)))

        def ours(work: Prompts) -> None:
            of_client = [[prompts[number] for prompts in work] for number in range(options.clients)]
            list(self._pool.map(lambda client, own: client.rl_steps(own, options), self._rl, of_client))

        return self._alternate("rl", [prompts_of(self.text, options, n) for n in range(1 + options.rounds)], ours)

    def train(self) -> dict[str, Any]:
        client = Client(self._url, self.options.clients, TRAIN_RANK)

        def ours(batch: Sequence[Sequence[int]]) -> None:
            data = [datum(tokens[:-1], {"target_tokens": np.array(tokens[1:], np.int64)}) for tokens in batch]
            client.train(data, "cross_entropy")

        return self._alternate("train", [batch_of(self.text)] * (1 + 2 * self.options.rounds), ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="rl, train; both if none is named")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--peft-clients", type=int, default=2, help="whose steps peft makes, for those of all")
    parser.add_argument("--samples", type=int, default=4, help="of each step")
    parser.add_argument("--tokens", type=int, default=16, help="of each sample")
    parser.add_argument("--steps", type=int, default=2, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--shape", default="smollm2", help="smollm2 or a directory")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    rows: list[dict[str, Any]] = []
    try:
        with ExitStack() as stack:
            bench = Bench(stack, options)
            for name, run in {"rl": bench.rl, "train": bench.train}.items():
                if not options.names or name in options.names:
                    rows.append({**run(), "dtype": options.dtype})
                    print(json.dumps(rows[-1]), flush=True)
    except DescantError as error:
        sys.exit(f"bench/rl_loop.py: {error}")
    finally:
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
