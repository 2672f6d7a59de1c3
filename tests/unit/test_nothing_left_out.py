"""What pytest collects and ruff lints is all there is: both leave out folders by their names without a word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = {"descant/wire/tinker_pb2.py", "descant/wire/tinker_pb2.pyi"}
"""Not ours to lint: ``grpcio-tools`` writes them (``tests/unit/wire/test_wire_schema.py``)."""

COLLECT = """
import pathlib, sys
import pytest

class Empty(pytest.Module):
    def collect(self):  # the file counts; importing it takes half a minute for all of them
        return []

class Names:
    def pytest_pycollect_makemodule(self, module_path, parent):
        print("collected:", module_path)
        return Empty.from_parent(parent, path=module_path)

sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Names()]))
"""


def collected(root: Path) -> set[str]:
    """Test files that pytest, started as the README's command starts it, would run."""
    done = subprocess.run([sys.executable, "-c", COLLECT], capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode in {0, pytest.ExitCode.NO_TESTS_COLLECTED}, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("collected: ")]
    return {str(Path(line.removeprefix("collected: ")).relative_to(root)) for line in lines}


def linted(root: Path) -> set[str]:
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root)
    assert done.returncode == 0, done.stderr
    return {str(Path(line).relative_to(root)) for line in done.stdout.split()}


def tracked(*patterns: str) -> set[str]:
    done = subprocess.run(["git", "ls-files", "-z", "--", *patterns], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        pytest.skip("not a git checkout, so what belongs to it is not known")
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}


def test_every_test_file_is_collected():
    on_disk = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py") if path.stem.startswith("test_")}
    assert len(on_disk) > 100
    assert collected(ROOT) == on_disk


def test_every_test_file_lies_under_tests():
    assert {name for name in tracked("test_*.py", "*/test_*.py") if not name.startswith("tests/")} == set()


def test_every_tracked_source_is_linted():
    assert tracked("*.py", "*.pyi") - linted(ROOT) == GENERATED


def test_both_checks_notice_a_folder_that_is_left_out(tmp_path: Path):
    """Pytest and ruff pass over a folder of this name unless they are told otherwise."""
    folder = "dist"
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for name in ("kept", folder):
        path = tmp_path / "tests" / name / "test_it.py"
        path.parent.mkdir(parents=True)
        path.write_text("def test_it(): ...\n")
    assert collected(tmp_path) == {"tests/kept/test_it.py"}
    assert linted(tmp_path) & {"tests/kept/test_it.py", f"tests/{folder}/test_it.py"} == {"tests/kept/test_it.py"}
