"""What was acknowledged is there after a real power cut: an ext4 file system that forgets what it was not made to keep.
Needs root, to mount; without it these tests are skipped."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from descant.testing.powercut import NOT_PERMITTED

pytestmark = pytest.mark.crashes

CUTS = 1000


def power_cuts(cuts: int, protocol: str) -> tuple[int, dict[str, int]]:
    """The exit code, and the last line's numbers."""
    command = [sys.executable, "-m", "descant.testing.powercut", "--cuts", str(cuts), "--protocol", protocol]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    if done.returncode == NOT_PERMITTED:
        pytest.skip(f"NO POWER CUTS: {done.stderr.strip()}")
    assert done.stdout, done.stderr
    last = done.stdout.splitlines()[-1]
    print(done.stdout)
    assert re.fullmatch(r"cuts=\d+ acknowledged=\d+ lost=\d+ invalid=\d+", last), done.stdout + done.stderr
    return done.returncode, {name: int(value) for name, value in (part.split("=") for part in last.split())}


def test_a_thousand_power_cuts_lose_nothing_that_was_acknowledged() -> None:
    code, found = power_cuts(CUTS, "full")
    assert (code, found["cuts"], found["lost"], found["invalid"]) == (0, CUTS, 0, 0)
    assert found["acknowledged"] > 5 * CUTS, "hardly anything was written: it is no test"


def test_a_store_without_fsyncs_of_directories_is_caught() -> None:
    """The test of the test."""
    code, found = power_cuts(100, "no-directory-fsync")
    assert code == 1
    assert found["lost"] > 0
