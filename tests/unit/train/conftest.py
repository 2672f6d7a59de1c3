from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from descant.model.load import ModelSource, load_model
from descant.testing.studio import Studio
from descant.testing.tiny import tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def new_studio(tiny_llama: Path) -> Callable[[], Studio]:
    def make() -> Studio:
        source = ModelSource(name="tiny", directory=tiny_llama)
        return Studio(load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False))

    return make


@pytest.fixture
def studio(new_studio: Callable[[], Studio]) -> Studio:
    return new_studio()
