"""On a CUDA device: a deterministic sampler gives a request the same bits in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from descant.model.load import ModelSource, load_model
from descant.sample.step import Sampler
from descant.testing.company import in_every_company
from descant.testing.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2"])
def test_the_same_bits_in_any_company(tmp_path: Path, arch: str, dtype: torch.dtype, compiled: bool) -> None:
    source = ModelSource(name=arch, directory=tiny_model(arch, tmp_path / arch))
    model = load_model(source, device=torch.device("cuda"), dtype=dtype, check=False)
    sampler = Sampler(model, num_pages=64, deterministic=True, compile_decode=compiled)
    found = in_every_company(model, sampler)
    alone = found.pop("alone")
    for company, drawn in found.items():
        for name in alone:
            assert drawn[name] == alone[name], (company, name)
    assert sampler._decode is not None
    assert not any(key.beside for key in sampler._decode._graphs), "whether they are would depend on the company"
