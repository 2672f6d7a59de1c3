"""What CI runs, decided by the real script in a repository of our own, with a ``make`` that says what it was told."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALWAYS = "made: lint types test"
TIERS = ["test-crashes", "test-ray", "test-sdks", "test-recipes"]


def git(repository: Path, *command: str, hours_ago: float = 0) -> str:
    date = f"{time.time() - 3600 * hours_ago:.0f} +0000"
    identity = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **identity, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    done = subprocess.run(
        ["git", *command], cwd=repository, env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.strip()


class Repository:
    def __init__(self, path: Path):
        self.path = path / "repository"
        (self.path / ".ci").mkdir(parents=True)
        (self.path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
        self.bin = path / "bin"
        self.bin.mkdir()
        (self.bin / "make").write_text('#!/bin/sh\necho "made: $*"\ncase "$*" in *"$FAILS"*) exit 2;; esac\n')
        (self.bin / "make").chmod(0o755)
        git(self.path, "init", "-q")

    def commit(self, *names: str, hours_ago: float) -> str:
        for name in names:
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{path.read_text() if path.exists() else ''}more\n")
        git(self.path, "add", "-A")
        git(self.path, "commit", "-q", "--allow-empty", "-m", "x", hours_ago=hours_ago)
        return git(self.path, "rev-parse", "HEAD")

    def run(self, base: str = "", fails: str = "nothing") -> tuple[int, list[str]]:
        environment = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "FAILS": fails}
        environment.pop("CI_BASE", None)
        if base:
            environment["CI_BASE"] = base
        command = ["bash", str(self.path / ".ci" / "run")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd="/")
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout.splitlines()


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    repository = Repository(tmp_path)
    repository.commit("README.md", hours_ago=9)
    return repository


def not_run(lines: list[str]) -> set[str]:
    return {line.split()[2].rstrip(",") for line in lines if line.startswith("NOT RUN:")}


@pytest.mark.parametrize(
    ("path", "tiers"),
    [
        ("docs/serve.md", []),
        ("tests/unit/wire/test_wire_decode.py", []),
        ("descant/distributed/coordinator/state.py", ["test-crashes", "test-ray"]),
        ("descant/ranks/ray_rank.py", ["test-crashes", "test-ray", "test-recipes"]),
        ("tests/cluster/conftest.py", ["test-ray"]),
        ("tests/e2e/test_serve_command.py", ["test-crashes"]),
        ("constraints.txt", ["test-crashes", "test-ray"]),
        ("descant/wire/requests.py", ["test-crashes", "test-sdks", "test-recipes"]),
        ("descant/train/loss.py", ["test-crashes", "test-sdks", "test-recipes"]),
        ("descant/types.py", ["test-crashes", "test-sdks", "test-recipes"]),
        ("descant/app.py", TIERS),
        ("tests/recipes/cookbook.py", ["test-recipes"]),
        ("constraints-sdks.txt", ["test-sdks"]),
        ("Makefile", TIERS),
        (".ci/run", TIERS),
    ],
)
def test_the_tiers_of_what_has_changed_run_after_what_always_does(
    repository: Repository, path: str, tiers: list[str]
) -> None:
    repository.commit(path, hours_ago=3)
    code, lines = repository.run()
    assert code == 0
    assert [line for line in lines if line.startswith("made:")] == [ALWAYS, *(f"made: {tier}" for tier in tiers)]
    assert not_run(lines) == set(TIERS) - set(tiers)
    assert all(f"make {tier}" in "\n".join(lines) for tier in TIERS if tier not in tiers)
    assert lines[-1].startswith("made:"), "the last word is the last tests'"


def test_what_is_older_than_four_hours_has_been_through_here(repository: Repository) -> None:
    repository.commit("descant/ranks/loop.py", hours_ago=5)
    repository.commit("docs/serve.md", hours_ago=1)
    assert not_run(repository.run()[1]) == set(TIERS)


def test_all_that_was_committed_since_counts(repository: Repository) -> None:
    repository.commit("descant/distributed/coordinator/state.py", hours_ago=3)
    repository.commit("constraints-sdks.txt", hours_ago=0)
    assert not_run(repository.run()[1]) == {"test-recipes"}


def test_every_tier_is_a_target_of_the_makefile() -> None:
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("test-")}
    assert targets == set(TIERS)


def test_a_base_may_be_named(repository: Repository) -> None:
    first = repository.commit("descant/distributed/coordinator/state.py", hours_ago=8)
    repository.commit("constraints-sdks.txt", hours_ago=7)
    assert not_run(repository.run(base=first)[1]) == {"test-crashes", "test-ray", "test-recipes"}


def test_where_all_is_young_all_runs(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.commit("descant/app.py", hours_ago=1)
    assert not_run(repository.run()[1]) == set()


@pytest.mark.parametrize(("fails", "made"), [("types", 1), ("test-sdks", 4)])
def test_the_first_failure_is_the_end(repository: Repository, fails: str, made: int) -> None:
    repository.commit("Makefile", hours_ago=1)
    code, lines = repository.run(fails=fails)
    assert code == 2
    assert len(lines) == made
