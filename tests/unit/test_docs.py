"""What the documents name must exist: settings, options, make targets, files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import pytest

from descant.cli import main
from descant.config import Settings, leaves

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "bench" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}

SETTINGS = {key for key, _ in leaves(Settings())}
TABLES = {key.partition(".")[0] for key in SETTINGS if "." in key}
OPTIONS = {
    option
    for command in [main, *main.commands.values()]
    for parameter in command.params
    if isinstance(parameter, click.Option)
    for option in parameter.opts
}
SCRIPTS = [
    *(ROOT / "examples").glob("*.py"),
    *(ROOT / "bench").glob("*.py"),
    ROOT / "descant" / "testing" / "faults.py",
]
EXAMPLE_OPTIONS = set(re.findall(r'add_argument\("(--[a-z-]+)"', "".join(path.read_text() for path in SCRIPTS)))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def code(text: str) -> str:
    """The parts of a document that are code: fenced blocks and what stands in backquotes."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))])


@pytest.mark.parametrize("name", TEXTS)
def test_settings_that_are_named_exist(name: str):
    named = set(re.findall(rf"\b((?:{'|'.join(TABLES)})\.[a-z_]+(?:\.[a-z_]+)*)\b", code(TEXTS[name])))
    modules = {
        ".".join(path.relative_to(ROOT / "descant").with_suffix("").parts) for path in (ROOT / "descant").rglob("*.py")
    }
    unknown = {key for key in named - SETTINGS if not key.startswith("auth.keys") and key not in modules}
    assert {key for key in unknown if key not in _functions()} == set()


def _functions() -> set[str]:
    """``service.sample`` and the like: a package and a name that is defined in it."""
    found = set()
    for path in (ROOT / "descant").rglob("*.py"):
        package = path.relative_to(ROOT / "descant").parts[0].removesuffix(".py")
        found |= {f"{package}.{name}" for name in re.findall(r"(?:def|class) (\w+)", path.read_text())}
    return found


def test_every_setting_is_documented():
    assert {key for key in SETTINGS if f"`{key}`" not in TEXTS["docs/using.md"]} == set()


@pytest.mark.parametrize("name", TEXTS)
def test_options_that_are_named_exist(name: str):
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", code(TEXTS[name])))
    assert named <= OPTIONS | EXAMPLE_OPTIONS


def test_every_option_is_documented():
    assert {option for option in OPTIONS if option.startswith("--") and option not in TEXTS["docs/using.md"]} <= {
        "--help",
        "--version",
    }


@pytest.mark.parametrize("name", TEXTS)
def test_make_targets_that_are_named_exist(name: str):
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", code(TEXTS[name]))) <= TARGETS


def test_the_readme_opens_with_the_two_commands():
    first_block = re.search(r"```sh\n(.*?)```", TEXTS["README.md"], re.DOTALL)
    assert first_block is not None
    assert re.findall(r"^(\S+ \S+)", first_block[1], re.MULTILINE) == ["make demo", "make test"]


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_are_named_exist(name: str):
    text = TEXTS[name]
    linked = {target for target in re.findall(r"\]\(([^)#]+)\)", text) if not target.startswith("http")}
    assert {target for target in linked if not ((ROOT / name).parent / target).exists()} == set()
    named = set(re.findall(r"\b((?:descant|examples|tests|docs|bench)/[\w./]+\.(?:py|md|jsonl))\b", text))
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_the_example_file_of_settings_loads():
    block = re.search(r"```toml\n(.*?)```", TEXTS["docs/using.md"], re.DOTALL)
    assert block is not None
    values = tomllib.loads(block[1])
    assert set(values) <= {key.partition(".")[0] for key in SETTINGS}
    assert set(values["server"]) <= {key.partition(".")[2] for key in SETTINGS if key.startswith("server.")}
