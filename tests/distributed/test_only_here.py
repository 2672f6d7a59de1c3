"""``torch.distributed`` is called in one package's two files: elsewhere a call could take the default group or hang."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {"descant/distributed/mesh.py", "descant/distributed/fsdp.py"}
WITH_TORCH = {"mesh", "fsdp"}


def uses(source: str) -> Iterator[int]:
    """Lines that import ``torch.distributed`` or reach it as an attribute."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names) if any(f"{name.name}.".startswith("torch.distributed.") for name in names):
                yield node.lineno
            case ast.ImportFrom(module=str(module)) if f"{module}.".startswith("torch.distributed."):
                yield node.lineno
            case ast.ImportFrom(module="torch", names=names) if any(name.name == "distributed" for name in names):
                yield node.lineno
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
                yield node.lineno


def test_torch_distributed_is_called_in_the_mesh_and_for_sharding_alone():
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / "descant").rglob("*.py")
        if str(path.relative_to(ROOT)) not in ALLOWED
        for line in uses(path.read_text(encoding="utf-8"))
    }
    assert found == set()
    assert list(uses((ROOT / "descant/distributed/mesh.py").read_text()))


@pytest.mark.parametrize(
    "line",
    [
        "import torch.distributed as dist",
        "import torch.distributed.fsdp",
        "from torch import distributed",
        "from torch.distributed import barrier",
        "from torch.distributed.fsdp import fully_shard",
        "import torch\ntorch.distributed.barrier()",
    ],
)
def test_the_lint_can_fail(line: str):
    assert list(uses(line))


def test_no_collective_names_the_default_group():
    """In the mesh every collective passes ``group=``."""
    tree = ast.parse((ROOT / "descant/distributed/mesh.py").read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "dist"
        and node.func.attr in {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "send", "recv", "barrier"}
    ]
    assert len(calls) == 3
    assert all("group" in {keyword.arg for keyword in call.keywords} for call in calls)


def test_all_but_the_mesh_runs_without_torch():
    package = ROOT / "descant/distributed"
    files = {".".join(path.relative_to(package).with_suffix("").parts) for path in package.rglob("*.py")} - {"__init__"}
    names = [f"descant.distributed.{name}" for name in sorted(files - WITH_TORCH)]
    assert files > WITH_TORCH | {"coordinator.client"}
    program = f"import importlib, sys\nfor n in {names}: importlib.import_module(n)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("False\n", "")
