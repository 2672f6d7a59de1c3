from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cookbook import MODEL, PYTHON, furnish

from descant.testing.server import Server, serve


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where server and recipes are started."""
    if not (PYTHON.parent.parent / ".installed").exists():
        pytest.skip("THE COOKBOOK IS NOT INSTALLED: no recipe is run; `make test-recipes` installs it and runs them")
    path = tmp_path_factory.mktemp("place")
    furnish(path)
    return path


@pytest.fixture(scope="module")
def server(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = ("losses.stable_reinforce=importance_sampling", "rank.num_threads=2")
    with serve(MODEL, tmp_path_factory.mktemp("server") / "data", *settings, cwd=place) as running:
        yield running
