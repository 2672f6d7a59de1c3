"""The process that writes checkpoints: what it writes, what it takes, and what it says when it cannot."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from descant.ckpt.staging import Arena, Staging
from descant.ckpt.tensor_file import contents_of
from descant.ckpt.writer import CheckpointWriter, WriterLimits
from descant.errors import CannotStore, ServerError
from descant.testing.writer_faults import faulty
from descant.types import FileEntry

CPU = torch.device("cpu")
LIMITS = WriterLimits(answer_s=20.0, silence_s=20.0, beat_s=0.1)


@pytest.fixture
def writer() -> Iterator[CheckpointWriter]:
    made = CheckpointWriter(CPU, limits=LIMITS)
    yield made
    made.close()


def odd_tensors() -> dict[str, torch.Tensor]:
    """Of any strides and dtypes; the largest is longer than a slot of the arena."""
    generator = torch.Generator().manual_seed(0)
    experts = torch.randn(3, 40, 700, generator=generator)
    return {
        "large": torch.randn(2_500_000, generator=generator),
        "large, transposed": torch.randn(3000, 1000, generator=generator).t(),
        "sliced": experts[:, :, :300],
        "an expert": experts[1],
        "every other": torch.arange(1000.0)[::2],
        "longer rows than a slot": torch.randn(2, 2, 2_200_000, generator=generator).transpose(0, 1),
        "expanded": torch.tensor([1.5, 2.5]).expand(7, 2),
        "scalar": torch.tensor(0.5),
        "none": torch.zeros(4, 0),
        "bfloat16, transposed": torch.randn(30, 20, generator=generator).bfloat16().t(),
        "bools": torch.arange(11) % 3 == 0,
    }


def test_files_hold_what_was_given_and_entries_say_so(writer: CheckpointWriter, tmp_path: Path) -> None:
    tensors = odd_tensors()
    entries = writer.write(str(tmp_path), {"a": contents_of(tensors), "b": [b"some ", b"bytes"], "c": []})
    read = safetensors.torch.load_file(tmp_path / "a")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    bodies = {name: (tmp_path / name).read_bytes() for name in "abc"}
    assert (bodies["b"], bodies["c"]) == (b"some bytes", b"")
    assert entries == {
        name: FileEntry(size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest()) for name, body in bodies.items()
    }
    stats = writer.stats()
    assert stats["save_bytes"] == sum(map(len, bodies.values()))
    assert stats["save_written_seconds"] >= stats["save_staged_seconds"] > 0
    assert (stats["writer_alive"], stats["writer_restarts"]) == (1, 0)


def test_what_was_staged_may_change_before_it_is_written(writer: CheckpointWriter, tmp_path: Path) -> None:
    tensor = torch.ones(5_000_000)
    expected = tensor.clone()
    writer.write(str(tmp_path), {"a": contents_of({"t": tensor})}, staged=lambda: tensor.zero_())
    assert torch.equal(safetensors.torch.load_file(tmp_path / "a")["t"], expected)
    assert not tensor.any()


class LateAnswer(Future[list[Any]]):
    """Its bytes of the arena are read when somebody waits for it, and not before."""

    def __init__(self, arena: Arena, offset: int, num_bytes: int):
        super().__init__()
        self._arena, self._place, self.body = arena, (offset, num_bytes), b""

    def result(self, timeout: float | None = None) -> list[Any]:
        if not self.done():
            offset, num_bytes = self._place
            self.body = self._arena.memory[offset : offset + num_bytes]
            self.set_result([])
        return super().result(0)


@pytest.mark.parametrize("slot_bytes", [8, 64, 4096])
def test_a_slot_is_filled_again_when_its_bytes_have_been_written(slot_bytes: int) -> None:
    """As late as it may be; and slots of any size carry the same bytes in order."""
    arena = Arena(CPU, num_slots=3, slot_bytes=slot_bytes)
    staging, answers = Staging(arena, CPU), list[LateAnswer]()
    tensors = {
        name: tensor.reshape(-1)[:500] if tensor.is_contiguous() else tensor
        for name, tensor in odd_tensors().items()
        if tensor.numel() < 100_000
    }

    def send(offset: int, num_bytes: int) -> Future[list[Any]]:
        assert offset % slot_bytes == 0
        assert 0 < num_bytes <= slot_bytes
        answers.append(LateAnswer(arena, offset, num_bytes))
        return answers[-1]

    with staging.use(patience_s=10):
        staging.stage(contents_of(tensors), send)
        assert sum(not answer.done() for answer in answers) == arena.num_slots
        for answer in answers:
            answer.result()
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert b"".join(answer.body for answer in answers) == safetensors.torch.save(whole, {"format": "pt"})


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_a_directory_that_is_none(writer: CheckpointWriter, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotStore, match="cannot be written: No such file or directory"):
        writer.write(str(tmp_path / "no"), {"a": [b"a"]})
    with pytest.raises(CannotStore, match="cannot be written: Not a directory"):
        writer.write(str(tmp_path / "file"), {"a": [b"a"]})
    assert writer.write(str(tmp_path), {"a": [b"a"]})


def test_nothing_is_written_over(writer: CheckpointWriter, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"another's")
    with pytest.raises(CannotStore, match="File exists"):
        writer.write(str(tmp_path), {"a": [b"a"]})
    assert (tmp_path / "a").read_bytes() == b"another's"


def test_a_disk_that_is_full(writer: CheckpointWriter, tmp_path: Path) -> None:
    """A file may have 1 MiB: beyond that the system says EFBIG, as a full one says ENOSPC, in the middle of a write."""
    writer.start()
    assert writer.pid is not None
    before = resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with pytest.raises(CannotStore, match=r"^the data directory is full$"):
        writer.write(str(tmp_path), {"a": contents_of({"t": torch.zeros(20_000_000)})})
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, before)
    assert writer.write(str(tmp_path), {"b": contents_of({"t": torch.zeros(1_000_000)})})
    assert writer.stats()["writer_restarts"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_small_file_system(writer: CheckpointWriter, tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    try:
        with pytest.raises(CannotStore, match=r"^the data directory is full$"):
            writer.write(str(tmp_path), {"a": contents_of({"t": torch.zeros(2_000_000)})})
        assert not list(tmp_path.iterdir()), "refused before anything was written"
        assert writer.write(str(tmp_path), {"a": contents_of({"t": torch.zeros(200_000)})})
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(CannotStore, match="it is read-only"):
            writer.write(str(tmp_path), {"b": [b"b"]})
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("point", ["before create", "within write", "before fsync"])
def test_a_disk_that_reports_an_error(tmp_path: Path, point: str) -> None:
    writer = CheckpointWriter(CPU, limits=LIMITS, program=faulty(tmp_path / "flag", "EIO", point))
    try:
        with pytest.raises(CannotStore, match="its disk reports an error"):
            writer.write(str(tmp_path), {"a": contents_of({"t": torch.zeros(20_000_000)}), "b": [b"b"]})
        pid = writer.pid
        assert writer.write(str(tmp_path), {"c": [b"c"]})
        assert writer.pid == pid, "it goes on"
    finally:
        writer.close()


def test_a_program_that_does_not_start_is_named(tmp_path: Path) -> None:
    writer = CheckpointWriter(CPU, limits=LIMITS, program=("-c", "raise SystemExit(3)"))
    with pytest.raises(ServerError, match="checkpoints ended with exit code 3 as it was started"):
        writer.start(tmp_path)


def test_a_start_without_descriptors_is_named(tmp_path: Path) -> None:
    program = (
        "import resource, sys, torch; from pathlib import Path; from descant.ckpt.writer import CheckpointWriter\n"
        "from descant.errors import ServerError\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), 64))\n"
        "try: CheckpointWriter(torch.device('cpu')).start(Path(sys.argv[2]))\n"
        "except ServerError as error: print(error)"
    )

    def said(limit: int) -> str:
        arguments = [sys.executable, "-c", program, str(limit), str(tmp_path)]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True).stdout

    assert said(64) == ""
    assert "may open 12 files, expected 16: raise `ulimit -n`" in said(12)
    assert "Too many open files" in said(4)


def test_a_start_that_finds_all_well_leaves_nothing(writer: CheckpointWriter, tmp_path: Path) -> None:
    writer.start(tmp_path / "made")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "made").iterdir())


def test_a_start_says_what_is_wrong_with_the_directory(writer: CheckpointWriter, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotStore, match="the data directory cannot be written"):
        writer.start(tmp_path / "file")


def test_a_start_on_a_full_disk_is_none(writer: CheckpointWriter, tmp_path: Path) -> None:
    """The server trains and samples on one, too."""
    writer.start()
    assert writer.pid is not None
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    writer.start(tmp_path)
    with pytest.raises(CannotStore, match="is full"):
        writer.write(str(tmp_path), {"a": [b"a"]})


def test_one_save_at_a_time(writer: CheckpointWriter, tmp_path: Path) -> None:
    def another() -> None:
        with pytest.raises(ServerError, match="while others are"):
            writer.write(str(tmp_path), {"b": [b"b"]})

    writer.write(str(tmp_path), {"a": [b"a"]}, staged=another)
    assert writer.write(str(tmp_path), {"c": [b"c"]})


def test_it_ends_when_it_is_closed(writer: CheckpointWriter, tmp_path: Path) -> None:
    writer.start()
    pid = writer.pid
    writer.close()
    assert writer.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)


# ------------------------------------------------------------------------------------------------ descriptors

MANY = """
import os, resource, sys, tempfile
import torch
from descant.ckpt.tensor_file import contents_of
from descant.ckpt.writer import CheckpointWriter

num_tensors, num_saves, limit, directory = *map(int, sys.argv[1:4]), sys.argv[4]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
before = len(os.listdir("/proc/self/fd"))
tensors = {f"t{i}": torch.full((3, 5), float(i)) for i in range(num_tensors)}
writer = CheckpointWriter(torch.device("cpu"))
for number in range(num_saves):
    most = []
    def count():
        most.append((len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{writer.pid}/fd"))))
    path = tempfile.mkdtemp(dir=directory)
    writer.write(path, {"a": contents_of(tensors), "b": contents_of(tensors)}, staged=count)
    print(most[0][0] - before, most[0][0], most[0][1])
"""


@pytest.mark.parametrize(("num_tensors", "num_saves", "limit"), [(3000, 2, 1024), (5000, 20, 256)])
def test_descriptors_do_not_depend_on_tensors_or_saves(
    tmp_path: Path, num_tensors: int, num_saves: int, limit: int
) -> None:
    arguments = [sys.executable, "-c", MANY, *map(str, (num_tensors, num_saves, limit)), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    counts = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(counts) == num_saves
    assert all(added <= 4 and ours <= 12 and theirs <= 12 for added, ours, theirs in counts), counts
    assert all(abs(one - other) <= 2 for now in counts[1:] for one, other in zip(now, counts[1])), counts


def test_it_loads_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, descant.ckpt.writer_main; print(*sorted({'torch', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
