"""The design's layers: which package may import which, read from the source; and what an import really loads."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "descant"

NOUNS = {"types", "errors"}
MAY_IMPORT: Mapping[str, set[str]] = {
    "seeds": set(),
    "types": set(),
    "errors": set(),
    "storage": {"errors"},
    "prefix": {"types"},
    "pauses": set(),
    "ports": NOUNS,
    "wire": NOUNS,
    "service": NOUNS | {"ports", "storage"},
    "server": NOUNS | {"wire", "service"},
    "adapters": NOUNS | {"seeds", "storage"},
    "model": NOUNS | {"adapters", "pauses"},
    "train": NOUNS | {"model", "adapters"},
    "sample": NOUNS | {"model", "adapters", "prefix", "pauses"},
    "ckpt": NOUNS | {"model", "adapters", "ports", "storage"},
    "distributed": NOUNS,
    "ranks": NOUNS | {"ports", "prefix", "pauses", "model", "train", "sample", "ckpt", "distributed"},
    "pools": NOUNS | {"ports", "prefix", "ckpt", "ranks"},
    "config": NOUNS | {"service", "server", "ranks", "ckpt"},
    "bench": NOUNS | {"model", "adapters", "train", "sample"},
    "checkpoints": NOUNS | {"model", "adapters", "ckpt", "service"},
    "doctor": NOUNS | {"ckpt", "distributed", "ranks"},
}
"""Changes in the commit that changes the design. A package may import itself."""

PARTS: Mapping[tuple[str, str], set[str]] = {
    ("pools", "ckpt"): {"descant.ckpt.manifest"},
    ("pools", "ranks"): {"descant.ranks.health"},
}
"""Where a package may import only these modules of another, which are data and load nothing."""

MAY_IMPORT_ANYTHING = {"app", "cli", "demo", "testing"}

WEB = {"starlette", "uvicorn", "pydantic", "httptools", "uvloop"}
SQL = {"sqlalchemy"}
TORCH = {"torch", "transformers", "safetensors", "peft"}
MAY_NOT_IMPORT: Mapping[str, set[str]] = {
    "types": WEB | SQL | TORCH,
    "errors": WEB | SQL | TORCH | {"numpy"},
    "storage": WEB | SQL | TORCH | {"numpy"},
    "ports": WEB | SQL | TORCH,
    "prefix": WEB | SQL | TORCH,
    "pauses": WEB | SQL | (TORCH - {"torch"}),
    "pools": WEB | SQL | TORCH | {"tinker"},
    "wire": SQL | TORCH | {"starlette", "uvicorn", "tinker"},
    "service": WEB | TORCH | {"tinker"},
    "server": SQL | TORCH | {"tinker"},
    "adapters": WEB | SQL | {"tinker", "click", "rich", "transformers", "peft"},
    "model": WEB | SQL | {"tinker", "click", "rich"},
    "train": WEB | SQL | {"tinker", "click", "rich"},
    "sample": WEB | SQL | {"tinker", "click", "rich"},
    "ckpt": WEB | SQL | {"tinker", "click", "rich"},
    "distributed": WEB | SQL | {"tinker", "click", "rich", "transformers", "safetensors", "peft"},
    "ranks": WEB | SQL | {"tinker", "click", "rich"},
}

CUDA_KERNELS = {
    "descant.model.lora.paged_kernels",
    "descant.model.lora.kernels",
    "descant.model.attention.paged",
    "descant.model.attention.prefill_kernels",
    "descant.model.attention.decode_kernels",
    "descant.model.attention.head_shape",
    "descant.model.swiglu_kernel",
    "descant.sample.sampling_kernel",
}
"""Imported where they are used, on CUDA: they need Triton, which comes with PyTorch there and only there."""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file names in an import, wherever the import stands, as (line, dotted name)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                package = path.relative_to(ROOT).parts[:-1]
                module = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            else:
                module = node.module or ""
            yield node.lineno, module
            if module == "descant":
                yield from ((node.lineno, f"descant.{alias.name}") for alias in node.names)


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def violations(paths: Iterator[Path]) -> list[str]:
    found = []
    for path in paths:
        importer = layer(path)
        if importer in MAY_IMPORT_ANYTHING or importer == "__init__":
            continue
        for line, module in imports(path):
            top, _, rest = module.partition(".")
            where = f"{path.relative_to(ROOT)}:{line}"
            if top == "descant" and rest:
                imported = rest.partition(".")[0]
                if imported != importer and imported not in MAY_IMPORT[importer]:
                    found.append(f"{where}: {importer} may not import {imported}")
                elif module not in PARTS.get((importer, imported), {module}):
                    found.append(f"{where}: {importer} may not import {module}")
            elif top in MAY_NOT_IMPORT.get(importer, ()):
                found.append(f"{where}: {importer} may not import {top}")
    return found


def test_packages_import_downward_only():
    assert violations(PACKAGE.rglob("*.py")) == []


def test_every_package_has_its_line_in_the_table():
    layers = {layer(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    assert layers <= set(MAY_IMPORT) | MAY_IMPORT_ANYTHING


@pytest.mark.parametrize(
    ("line", "says"),
    [
        pytest.param("from descant.train.requests import Learner", "may not import train", id="sideways"),
        pytest.param("import descant.server", "may not import server", id="upward"),
        pytest.param("from descant import server", "may not import server", id="from the top"),
        pytest.param("def f():\n    import torch", "may not import torch", id="inside a function"),
        pytest.param("from ..train import requests", "may not import train", id="relative"),
    ],
)
def test_the_check_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, says: str):
    path = tmp_path / "descant" / "service" / "wrong.py"
    path.parent.mkdir(parents=True)
    path.write_text(line)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "descant")
    assert [says in violation for violation in violations(iter([path]))] == [True]


@pytest.mark.parametrize(
    ("package", "absent"),
    [
        pytest.param("service", WEB | TORCH, id="service without torch and the web"),
        pytest.param("wire", SQL | TORCH | {"starlette", "tinker"}, id="wire without torch and SQL"),
        pytest.param("adapters", WEB | SQL | {"transformers", "peft"}, id="adapters without models, the web and SQL"),
        pytest.param("model", WEB | SQL, id="model without the web and SQL"),
        pytest.param("train", WEB | SQL, id="train without the web and SQL"),
        pytest.param("train/requests", WEB | SQL | TORCH, id="the rules of training requests without torch"),
        pytest.param("sample", WEB | SQL, id="sample without the web and SQL"),
        pytest.param("sample/plan", WEB | SQL | TORCH, id="what schedulers and samplers exchange without torch"),
        pytest.param("sample/scheduler", WEB | SQL | TORCH, id="the scheduler without torch"),
        pytest.param("pools", WEB | SQL | TORCH, id="pools without torch, the web and SQL"),
        pytest.param("config", TORCH, id="config without torch"),
        pytest.param("cli", TORCH, id="the command line without torch"),
    ],
)
def test_importing_a_package_loads_no_more_than_it_needs(package: str, absent: set[str]):
    """Every module of the package, or the one module, in a process of its own. A GPU machine may lack the web and SQL
    packages."""
    directory = PACKAGE / package
    paths = sorted(directory.rglob("*.py")) if directory.is_dir() else [PACKAGE / f"{package}.py"]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    if importlib.util.find_spec("triton") is None:
        modules = [module for module in modules if module not in CUDA_KERNELS]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*sorted(set({sorted(absent)!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


JSON_NAMES = {"AdamParams", "SampleRequest", "SamplingParams"}
"""The SDK's names, which ``types`` has for a thing and ``wire.requests`` for its JSON."""


def defined_twice(package: Path) -> dict[str, list[str]]:
    """Classes of several modules that have one name, and where; generated modules aside."""
    found: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and path.name != "tinker_pb2.py":
                found.setdefault(node.name, []).append(path.relative_to(package).as_posix())
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_a_class_name_is_defined_once():
    found = defined_twice(PACKAGE)
    assert found.keys() == JSON_NAMES
    assert all(found[name] == ["types.py", "wire/requests.py"] for name in JSON_NAMES)


def test_a_class_name_that_is_defined_twice_is_found(tmp_path: Path):
    for name in ("one.py", "inner/two.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("class Same: ...\n")
    assert defined_twice(tmp_path) == {"Same": ["inner/two.py", "one.py"]}
