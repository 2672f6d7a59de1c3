from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from descant.model.load import ModelSource, load_model
from descant.testing.learner import LearnerHarness
from descant.testing.tiny import tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def new_harness(tiny_llama: Path) -> Callable[..., LearnerHarness]:
    def make(**options: Any) -> LearnerHarness:
        source = ModelSource(name="tiny", directory=tiny_llama)
        return LearnerHarness(
            load_model(source, device=torch.device("cpu"), dtype=torch.float32, check=False), **options
        )

    return make


@pytest.fixture
def harness(new_harness: Callable[[], LearnerHarness]) -> LearnerHarness:
    return new_harness()
