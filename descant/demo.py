"""``descant demo``: a real server, two real clients, and a sentence at the end that says what was shown.

The server is ``descant serve`` in a process of its own on a port that the system chooses, with its data in a folder
that goes away. The clients are the scripts in ``examples/``, each with its own API key, in two threads.
"""

from __future__ import annotations

import importlib.util
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from descant.errors import ServerError, UserError

T = TypeVar("T")

EXAMPLES = Path(__file__).parents[1] / "examples"
START_DEADLINE_S = 300.0
RUN_DEADLINE_S = 900.0
SAME_LOSS = 1e-4
"""Relative difference up to which two losses are called the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    url: str
    model: str
    """What the server calls it, for a person."""
    pid: int


def run_demo(model: str) -> int:
    """0 if everything that the demo is to show was shown, else 1. Raises ``DescantError``."""
    console = Console(highlight=False)
    began = time.monotonic()
    os.environ["TINKER_TELEMETRY"] = "0"  # at exit the SDK would wait for a server that has ended
    habit_example, sums_example = _example("sft_habit"), _example("rl_sums")
    with tempfile.TemporaryDirectory(prefix="descant-demo-") as directory:
        console.print(f"Starting a server for [bold]{model}[/bold] (the first time, the model is converted once) …")
        with running_server(model, Path(directory)) as server:
            console.print(f"Descant serves {server.model} at {server.url}. Two clients train on it now:")
            habit, sums = _train_both(console, server, habit_example, sums_example)
    console.print(_results(habit_example.QUESTION, habit, sums))
    missing = _missing(habit_example.HABIT, habit, sums)
    if missing:
        console.print(f"[red]Not shown: {'; '.join(missing)}.[/red]")
        return 1
    console.print(
        f"[bold green]Shown in {time.monotonic() - began:.0f} s:[/] two clients trained their own adapters of one "
        f"{model} at the same time, loss {habit.losses[0]:.2f} → {habit.losses[-1]:.2f} and reward "
        f"{sums.before:.2f} → {sums.after:.2f}, and a saved checkpoint was loaded and went on with the same loss "
        f"({habit.continued[0]:.5f} = {habit.continued[1]:.5f}).",
        soft_wrap=True,
    )
    return 0


def _example(name: str) -> ModuleType:
    path = EXAMPLES / f"{name}.py"
    if not path.exists():
        raise UserError(f"the demo runs from a clone of the repository: there is no {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# --------------------------------------------------------------------------------------------------------------------
# The server


@contextmanager
def running_server(model: str, directory: Path, settings: Sequence[str] = ()) -> Iterator[RunningServer]:
    """``descant serve MODEL`` with these ``settings`` (``a.b=c``) until the block ends; then it is asked to stop, and
    waited for."""
    log = directory / "server.log"
    command = [sys.executable, "-m", "descant.cli", "serve", model, "--port", "0"]
    for setting in (f"data_dir={directory / 'data'}", *settings):
        command += ["--set", setting]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield _wait_until_ready(process, log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[str], log: Path) -> RunningServer:
    """Reads what ``serve`` prints when it is ready. A thread reads, so that the wait has a deadline."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.strip())
        lines.put(None)

    threading.Thread(target=read, daemon=True, name="server output").start()
    deadline = time.monotonic() + START_DEADLINE_S
    model = ""
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise ServerError(f"the server was not ready after {START_DEADLINE_S:.0f} s") from None
        if line is None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
            raise ServerError(f"the server ended with code {process.wait()} before it was ready: {last[0]}")
        if line.startswith("Descant serves "):
            model = line.removeprefix("Descant serves ").rpartition(" at ")[0]
        elif line.startswith("export TINKER_BASE_URL="):
            return RunningServer(url=line.partition("=")[2], model=model, pid=process.pid)


# --------------------------------------------------------------------------------------------------------------------
# The clients


def _train_both(console: Console, server: RunningServer, habit: ModuleType, sums: ModuleType) -> tuple[Any, Any]:
    bars = Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:>2.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[value]}"),
        TimeElapsedColumn(),
        console=console,
    )
    with bars:
        clients = {
            "alice": ("alice: supervised, a habit", "loss", habit),
            "bob": ("bob: reinforcement, short sums", "reward", sums),
        }
        running: dict[str, Future[Any]] = {}
        for name, (description, value, example) in clients.items():
            task = bars.add_task(description, total=1, value="")

            def show(step: int, num_steps: int, number: float, task: Any = task, value: str = value) -> None:
                bars.update(task, completed=step, total=num_steps, value=f"{value} {number:.2f}")
                if not console.is_terminal and (step % 5 == 0 or step == 1):
                    console.print(f"  {bars.tasks[task].description}: step {step}/{num_steps}, {value} {number:.2f}")

            running[name] = _in_thread(name, partial(_run, server, name, example, show))
        wait(running.values(), timeout=RUN_DEADLINE_S)
        for name, future in running.items():
            if not future.done():
                raise ServerError(f"{name} had not finished after {RUN_DEADLINE_S:.0f} s")
    return running["alice"].result(), running["bob"].result()


def _run(server: RunningServer, name: str, example: ModuleType, show: Any) -> Any:
    import tinker

    account: Any = {"base_url": server.url, "api_key": f"tml-demo-{name}"}
    base_model = tinker.RestClient(**account).get_server_capabilities().result().supported_models[0].model_name
    return example.run(tinker.ServiceClient(**account), base_model=base_model, progress=show)


def _in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """A daemon thread, so that a client which hangs does not keep the process alive past its deadline."""
    future: Future[T] = Future()

    def body() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return future


# --------------------------------------------------------------------------------------------------------------------
# What was shown


def _results(question: str, habit: Any, sums: Any) -> Table:
    table = Table(show_header=True, header_style="bold", title_justify="left")
    table.add_column("", overflow="fold")
    table.add_column("before")
    table.add_column("after")
    table.add_row(f"alice: {question}", habit.before, habit.after)
    table.add_row("alice: loss per token", f"{habit.losses[0]:.3f}", f"{habit.losses[-1]:.3f}")
    table.add_row("bob: a sum he never trained on", sums.sample[0], sums.sample[1])
    table.add_row("bob: reward on such sums", f"{sums.before:.2f}", f"{sums.after:.2f}")
    table.add_row(
        f"one more step, in memory and from\n{habit.checkpoint}",
        f"loss {habit.continued[0]:.6f}",
        f"loss {habit.continued[1]:.6f}",
    )
    return table


def _missing(signature: str, habit: Any, sums: Any) -> list[str]:
    """What the demo promised and these numbers do not show."""
    missing = []
    if not habit.losses[-1] < 0.7 * habit.losses[0]:
        missing.append(f"the loss did not fall ({habit.losses[0]:.3f} → {habit.losses[-1]:.3f})")
    if signature not in habit.after:
        missing.append("the habit is not in the answer after training")
    if not sums.after > sums.before:
        missing.append(f"the reward did not rise ({sums.before:.2f} → {sums.after:.2f})")
    went_on, loaded = habit.continued
    if not math.isclose(went_on, loaded, rel_tol=SAME_LOSS):
        missing.append(f"the loaded checkpoint went on with another loss ({went_on:.6f} and {loaded:.6f})")
    return missing
