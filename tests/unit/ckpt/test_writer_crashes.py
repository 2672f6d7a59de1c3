"""The process that writes checkpoints is ended, stopped, cut off from its rank: for real, at every point of a save."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch

from descant.ckpt.staging import Content
from descant.ckpt.tensor_file import contents_of
from descant.ckpt.writer import CheckpointWriter, WriterLimits
from descant.distributed.process_table import process_status
from descant.errors import ServerError
from descant.testing.writer_faults import POINTS, faulty

pytestmark = pytest.mark.crashes

CPU = torch.device("cpu")
PATIENT = WriterLimits(answer_s=30.0, silence_s=30.0, beat_s=0.05)
HASTY = WriterLimits(answer_s=3.0, bytes_per_s=float(32 << 20), silence_s=60.0, beat_s=0.05)
"""A process that answers no request in seconds does not answer. Silence alone would take longer."""
TENSORS = {"t": torch.arange(6_000_000.0), "transposed": torch.arange(600_000.0).view(1000, 600).t()}
WAIT_S = 10.0


def files() -> Mapping[str, Sequence[Content]]:
    """Of several slots each."""
    return {"a": contents_of(TENSORS), "b": contents_of(TENSORS)}


def is_gone(pid: int) -> bool:
    status = process_status(pid)
    return status is None or status.dead


def until(holds: Callable[[], bool], what: str, within_s: float = WAIT_S) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"not in {within_s} s: {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def closing(writer: CheckpointWriter) -> Iterator[CheckpointWriter]:
    try:
        yield writer
    finally:
        writer.close()


def succeeds(writer: CheckpointWriter, directory: Path) -> None:
    directory.mkdir()
    writer.write(str(directory), files())
    for name in files():
        read = safetensors.torch.load_file(directory / name)
        assert all(torch.equal(read[key], tensor) for key, tensor in TENSORS.items())


@pytest.mark.parametrize("point", POINTS)
def test_one_that_is_killed_fails_the_save_and_not_the_next(tmp_path: Path, point: str) -> None:
    program = faulty(tmp_path / "flag", "kill", point)
    with closing(CheckpointWriter(CPU, limits=PATIENT, program=program)) as writer:
        (tmp_path / "one").mkdir()
        with pytest.raises(ServerError) as raised:
            writer.write(str(tmp_path / "one"), files())
        said = "the process that writes checkpoints was ended by signal 9 (SIGKILL) while it was to "
        assert raised.value.message.startswith(said)
        doing = raised.value.message.removeprefix(said)
        assert doing.startswith(
            {
                "before create": "create a",
                "before fsync": "have the disk take a",
                "after fsync": "have the disk take a",
            }.get(point, "write 8388608 bytes of a")
        )
        assert doing.endswith("this save does not count, save again")
        assert (writer.stats()["writer_alive"], writer.stats()["writer_restarts"]) == (0, 0)
        succeeds(writer, tmp_path / "two")
        assert (writer.stats()["writer_alive"], writer.stats()["writer_restarts"]) == (1, 1)


@pytest.mark.parametrize("point", ["before create", "within write", "before fsync"])
def test_one_that_stands_still_is_given_up_by_its_deadline(tmp_path: Path, point: str) -> None:
    program = faulty(tmp_path / "flag", "stop", point)
    with closing(CheckpointWriter(CPU, limits=HASTY, program=program)) as writer:
        writer.start()
        stopped = writer.pid
        assert stopped is not None
        (tmp_path / "one").mkdir()
        with pytest.raises(ServerError, match=r"did not answer for \d+ s and was ended while .* a: this save"):
            writer.write(str(tmp_path / "one"), files())
        until(lambda: is_gone(stopped), "the process that stood still is gone")
        succeeds(writer, tmp_path / "two")


def test_one_that_stands_still_while_nothing_is_saved_is_noticed(tmp_path: Path) -> None:
    limits = WriterLimits(silence_s=1.0, beat_s=0.05)
    with closing(CheckpointWriter(CPU, limits=limits)) as writer:
        writer.start()
        stopped = writer.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: not writer.stats()["writer_alive"], "the silence was noticed")
        until(lambda: is_gone(stopped), "it was ended")
        succeeds(writer, tmp_path / "one")


def test_one_that_ends_while_nothing_is_saved_is_noticed(tmp_path: Path) -> None:
    with closing(CheckpointWriter(CPU, limits=PATIENT)) as writer:
        for number in range(3):
            writer.start()
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            until(lambda: not writer.stats()["writer_alive"], "the end was noticed")
            succeeds(writer, tmp_path / str(number))
        assert writer.stats()["writer_restarts"] == 3


def test_killed_at_random_a_save_is_whole_or_an_error(tmp_path: Path) -> None:
    chance, outcomes = random.Random(0), set()
    with closing(CheckpointWriter(CPU, limits=PATIENT)) as writer, ThreadPoolExecutor(1) as thread:
        for number in range(20):
            directory = tmp_path / str(number)
            directory.mkdir()
            writer.start()
            pid = writer.pid
            assert pid is not None
            saving = thread.submit(writer.write, str(directory), files())
            time.sleep(0.3 * chance.random())
            os.kill(pid, signal.SIGKILL)
            try:
                entries = saving.result(WAIT_S)
            except ServerError:
                outcomes.add("failed")
            else:
                outcomes.add("written")
                assert {name: entry.size_bytes for name, entry in entries.items()} == {
                    name: (directory / name).stat().st_size for name in files()
                }
                assert safetensors.torch.load_file(directory / "b").keys() == TENSORS.keys()
            # Its first thread may be gone before the others are, and the kernel says it has ended when all are.
            until(lambda pid=pid: is_gone(pid) and writer.pid != pid, "the one that was killed")
        succeeds(writer, tmp_path / "last")
    assert "failed" in outcomes


# ------------------------------------------------------------------------------------------------ the rank's end

RANK = """
import sys, tempfile
import torch
from descant.ckpt.writer import CheckpointWriter

writer = CheckpointWriter(torch.device("cpu"))
writer.start()
print(writer.pid, flush=True)
body = bytes(64 << 20)
while True:
    writer.write(tempfile.mkdtemp(dir=sys.argv[1]), {"a": [body]})
    print("saved", flush=True)
"""


@contextlib.contextmanager
def saving_rank(directory: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that saves all the time, and the process that writes for it."""
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(directory)], stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout is not None
        yield rank, int(rank.stdout.readline())
    finally:
        rank.kill()
        rank.wait(WAIT_S)


@pytest.mark.parametrize("stands_still", [False, True])
def test_it_ends_with_its_rank(tmp_path: Path, stands_still: bool) -> None:
    with saving_rank(tmp_path) as (rank, writer):
        if stands_still:
            os.kill(writer, signal.SIGSTOP)  # it cannot see its socket closed
        rank.kill()
        rank.wait(WAIT_S)
        until(lambda: is_gone(writer), "the writer of a dead rank", within_s=2.0)


def test_no_writer_of_a_dead_rank_changes_a_byte(tmp_path: Path) -> None:
    """50 ranks are killed as they save, each followed by the next at once."""
    chance, writers, seen = random.Random(1), [], {}

    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in tmp_path.rglob("a")}

    forks = _Forks(tmp_path)
    with contextlib.closing(forks):
        for _ in range(50):
            rank, writer = forks.start()
            until(lambda seen=seen: len(state()) > len(seen), "it writes")
            time.sleep(0.1 * chance.random())
            os.kill(rank, signal.SIGKILL)
            writers.append(writer)
            until(lambda writer=writer: is_gone(writer), "the writer of a dead rank", within_s=2.0)
            seen |= {path: found for path, found in state().items() if path not in seen}
    time.sleep(1.0)
    assert state() == seen
    assert len(set(writers)) == 50
    assert len(seen) >= 50
    assert len({size for size, _ in seen.values()}) >= 5, "it was killed as it wrote"


class _Forks:
    """Ranks that begin quickly: forked, before they have any thread, off a process that has loaded torch."""

    PROGRAM = """
import os, sys
import torch
import descant.ckpt.writer
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        sys.argv[1:] = [line.strip()]
        exec(os.environ["RANK"])
    print(pid, flush=True)
"""

    def __init__(self, directory: Path):
        self._directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": RANK},
        )

    def start(self) -> tuple[int, int]:
        """A rank's pid and its writer's, once it saves."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{self._directory}\n")
        self._process.stdin.flush()
        numbers = []
        while len(numbers) < 2:
            line = self._process.stdout.readline().strip()
            if line != "saved":
                numbers.append(int(line))
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        rank = next(number for number in numbers if str(number) in children)
        return rank, next(number for number in numbers if number != rank)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
