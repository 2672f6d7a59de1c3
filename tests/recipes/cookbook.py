"""The cookbook's own programs, in an environment of their own, against a server that is told nothing of them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from descant.model.load import resolve_model
from descant.testing.server import Server

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-recipes" / "bin" / "python"
RECIPE_S = 600
"""Longest wait for one recipe; importing the cookbook alone takes ten seconds."""

MODEL = "Qwen/Qwen3-8B-Base"
"""A name that the cookbook knows a renderer for; here it is a directory below the one that everybody works in."""


def furnish(path: Path) -> None:
    """The model under the name above, and the data sets that the recipes name, as small ones of our own."""
    link = path / MODEL
    link.parent.mkdir(parents=True)
    link.symlink_to(resolve_model("smollm2").directory)

    sums = [(f"What is 1 + {i % 3 + 1}?", str(i % 3 + 2)) for i in range(16)]
    # What a small model can get right by chance, so that rewards differ and there is something to reinforce.
    gsm8k = [{"question": "Say \\boxed{3} or \\boxed{4}.", "answer": "It is 3.\n#### 3"}] * 16
    _data_set(path / "openai" / "gsm8k", {"train": gsm8k, "test": gsm8k[:4]})
    (path / "openai" / "gsm8k" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - {split: train, path: train.jsonl}\n  - {split: test, path: test.jsonl}\n---\n"
    )
    chats = [{"messages": chat(question, answer)} for question, answer in sums]
    _data_set(path / "HuggingFaceH4" / "no_robots", {"train": chats, "test": chats[:4]})
    _data_set(path / "chats", {"chats": chats})


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _data_set(path: Path, splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    path.mkdir(parents=True)
    for split, rows in splits.items():
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class Run:
    """What a recipe left: its exit code, what it printed, a row of metrics for each step, its checkpoints."""

    code: int
    printed: str
    metrics: list[dict[str, Any]]
    checkpoints: list[dict[str, Any]]


def run(place: Path, server: Server, recipe: str, *arguments: str) -> Run:
    """``python -m tinker_cookbook.recipes.RECIPE ARGUMENT...``, its files in a directory of its own."""
    log_path = place / "runs" / recipe
    environment = {
        **{name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}},
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": "tml-cookbook",
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(place / "hub"),
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(PYTHON), "-m", f"tinker_cookbook.recipes.{recipe}", f"log_path={log_path}", *arguments]
    done = subprocess.run(
        command,
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RECIPE_S,
        check=False,
    )
    return Run(
        code=done.returncode,
        printed=done.stdout,
        metrics=_rows(log_path / "metrics.jsonl"),
        checkpoints=_rows(log_path / "checkpoints.jsonl"),
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
