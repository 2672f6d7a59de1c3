"""What the documents name exists and is as they say: settings, options, make targets, files, links, commands, code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from descant.cli import main
from descant.config import Settings, default_data_dir, leaves, load_settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}


def _commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        yield from _commands(inner)


DEFAULTS = dict(leaves(Settings()))
SETTINGS = set(DEFAULTS)
TABLES = {key.partition(".")[0] for key in SETTINGS if "." in key}
OPTIONS = {
    option
    for command in _commands(main)
    for parameter in command.params
    if isinstance(parameter, click.Option)
    for option in parameter.opts
}
SCRIPTS = [
    *(ROOT / "examples").glob("*.py"),
    *(ROOT / "bench").glob("*.py"),
    ROOT / "descant" / "testing" / "faults.py",
    ROOT / "descant" / "testing" / "powercut.py",
]
EXAMPLE_OPTIONS = set(re.findall(r'add_argument\("(--[a-z-]+)"', "".join(path.read_text() for path in SCRIPTS)))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def code(text: str) -> str:
    """The parts of a document that are code: fenced blocks and what stands in backquotes."""
    return "\n".join([*blocks(text, r"\w*"), *re.findall(r"`([^`\n]+)`", prose(text))])


def prose(text: str) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", TEXTS)
def test_settings_that_are_named_exist(name: str):
    named = set(re.findall(rf"\b((?:{'|'.join(TABLES)})\.[a-z_]+(?:\.[a-z_]+)*)\b", code(TEXTS[name])))
    modules = {
        ".".join(path.relative_to(ROOT / "descant").with_suffix("").parts) for path in (ROOT / "descant").rglob("*.py")
    }
    scripts = {path.name for path in SCRIPTS}
    unknown = {
        key
        for key in named - SETTINGS - scripts - modules
        if not key.startswith("auth.keys") and key.rpartition(".")[0] not in modules
    }
    assert {key for key in unknown if key not in _functions()} == set()


def _functions() -> set[str]:
    """``service.sample`` and the like: a package and a name that is defined in it."""
    found = set()
    for path in (ROOT / "descant").rglob("*.py"):
        package = path.relative_to(ROOT / "descant").parts[0].removesuffix(".py")
        found |= {f"{package}.{name}" for name in re.findall(r"(?:def|class) (\w+)", path.read_text())}
    return found


def _setting_rows() -> list[tuple[str, str]]:
    """(setting, default) of every row whose head says that these are its columns."""
    found: list[tuple[str, str]] = []
    for table in re.findall(r"^\| setting \| default \|.*\n((?:^\|.*\n)+)", TEXTS["docs/settings.md"], re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[1:]]
        found += [(key.strip("`"), default) for key, default, _ in rows]
    return found


def test_the_tables_of_settings_have_every_setting_once():
    assert Counter(key for key, _ in _setting_rows()) == Counter(SETTINGS)


@pytest.mark.parametrize(("key", "default"), _setting_rows())
def test_the_default_of_a_setting_is_what_the_code_says(key: str, default: str):
    value = DEFAULTS[key]
    sizes = {"MiB": 2**20, "GiB": 2**30}
    number, _, unit = default.partition(" ")
    if key == "data_dir":
        assert (default, value) == ("`~/.local/share/descant`", default_data_dir())
    elif value is None or value == () or value == {}:
        assert default == "" or default.endswith(" of the disk")
    elif isinstance(value, bool):
        assert default == str(value).lower()
    elif isinstance(value, str):
        assert default == f"`{value}`"
    else:
        assert float(number) * sizes.get(unit, 1) == value


@pytest.mark.parametrize("empty", ["", "none"])
def test_a_setting_is_unset_on_the_command_line_as_its_document_says(empty: str):
    set_before = load_settings(overrides=["parallel.replicas=2"])
    assert load_settings(overrides=[f"parallel.replicas={empty}"], base=set_before).parallel.replicas is None


@pytest.mark.parametrize("name", TEXTS)
def test_options_that_are_named_exist(name: str):
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]*)", code(TEXTS[name])))
    assert named <= OPTIONS | EXAMPLE_OPTIONS


def test_every_option_is_documented():
    text = "".join(TEXTS[name] for name in TEXTS if name.startswith("docs/"))
    assert {option for option in OPTIONS if option.startswith("--") and option not in text} <= {"--help", "--version"}


@pytest.mark.parametrize("name", TEXTS)
def test_make_targets_that_are_named_exist(name: str):
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", code(TEXTS[name]))) <= TARGETS


def test_the_readme_opens_with_the_two_commands():
    first_block = re.search(r"```sh\n(.*?)```", TEXTS["README.md"], re.DOTALL)
    assert first_block is not None
    assert re.findall(r"^(\S+ \S+)", first_block[1], re.MULTILINE) == ["make demo", "make test"]


def test_the_demo_takes_as_long_wherever_its_time_is_told():
    told = re.findall(r"one to two minutes on two cores", TEXTS["README.md"] + (ROOT / "Makefile").read_text())
    assert len(told) == 2


# --------------------------------------------------------------------------------------------------------------------
# Files, links and headings


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_are_named_exist(name: str):
    named = set(re.findall(r"\b((?:descant|examples|tests|docs|bench)/[\w./]+\.(?:py|md|jsonl))\b", TEXTS[name]))
    assert {path for path in named if not (ROOT / path).exists()} == set()


def headings(text: str) -> list[str]:
    """Of every level, without those inside code blocks."""
    return re.findall(r"^#+ +(.+?) *$", prose(text), re.MULTILINE)


def anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", TEXTS)
def test_a_heading_stands_once_in_a_file(name: str):
    found = Counter(map(anchor, headings(TEXTS[name])))
    assert {heading for heading, count in found.items() if count > 1} == set()


def broken_links(name: str, text: str) -> set[str]:
    """Relative links of a document, images among them, whose file or heading is not there."""
    broken = set()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        path, _, fragment = link.partition("#")
        target = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        if not target.exists():
            broken.add(link)
        elif fragment:
            there = text if not path else target.read_text(encoding="utf-8")
            if fragment not in map(anchor, headings(there)):
                broken.add(link)
    return broken


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str):
    assert broken_links(name, TEXTS[name]) == set()


def test_a_broken_link_is_noticed():
    text = "# One thing\n[a](#one-thing) [b](#other) [c](docs/none.md) [d](docs/serve.md#install) [e](docs/serve.md#x)"
    assert broken_links("README.md", text) == {"#other", "docs/none.md", "docs/serve.md#x"}


def test_every_document_is_linked_to_from_another():
    linked = {
        ((ROOT / name).parent / link.partition("#")[0]).resolve()
        for name, text in TEXTS.items()
        for link in re.findall(r"\]\(([^)\s]+)\)", text)
        if not link.startswith(("http", "#"))
    }
    assert {path.name for path in DOCUMENTS if path not in linked} <= {"README.md"}


def test_every_decision_has_its_date():
    titles = re.findall(r"^### .*\n(.*)$", TEXTS["docs/decisions.md"], re.MULTILINE)
    assert titles
    assert [line for line in titles if not re.match(r"\*20\d\d-[01]\d-[0-3]\d\.\* ", line)] == []


# --------------------------------------------------------------------------------------------------------------------
# Code blocks


def _python_blocks() -> Iterator[tuple[str, str]]:
    for name, text in TEXTS.items():
        yield from ((name, block) for block in blocks(text, "python"))


@pytest.mark.parametrize(("name", "block"), _python_blocks())
def test_python_blocks_compile(name: str, block: str):
    compile(block, name, "exec")


def test_the_first_example_is_whole():
    """It defines every name that it uses. ``tests/e2e/test_sdk.py`` runs it."""
    first = blocks(TEXTS["README.md"], "python")[0]
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "-"]
    done = subprocess.run(check, input=first, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def _commands_of_documents() -> list[tuple[str, str]]:
    """Every call of ``descant`` in a shell block; not lines of usage (``[--option]``) and those cut short (``…``)."""
    found = []
    for name, text in TEXTS.items():
        for line in "".join(blocks(text, "sh")).splitlines():
            command = re.sub(r"(^|\s)#.*", "", line).removesuffix("&").strip().removeprefix(".venv/bin/")
            if re.match(r"descant\s", command) and not re.search(r"[\[…]", command):
                found.append((name, command))
    return found


@pytest.mark.parametrize(("name", "line"), _commands_of_documents())
def test_commands_are_taken_as_they_stand(name: str, line: str):
    """Parsed by the command line itself, and not run; the values of ``--set`` are read as the server reads them."""
    command: click.Command = main
    _, *arguments = shlex.split(line)
    while isinstance(command, click.Group):
        command = command.commands[arguments.pop(0)]
    context = command.make_context(command.name, arguments)
    load_settings(overrides=context.params.get("overrides") or ())


@pytest.mark.parametrize("name", TEXTS)
def test_scripts_have_the_options_that_they_are_called_with(name: str):
    calls = re.findall(r"python ((?:bench|examples)/\w+\.py)([^\n#`]*)", code(TEXTS[name]))
    unknown = [
        (script, option)
        for script, arguments in calls
        for option in re.findall(r"--[a-z-]+", arguments)
        if f'add_argument("{option}"' not in (ROOT / script).read_text()
    ]
    assert unknown == []


@pytest.mark.parametrize("block", [block for text in TEXTS.values() for block in blocks(text, "toml")])
def test_files_of_settings_load(block: str, tmp_path: Path):
    (tmp_path / "descant.toml").write_text(re.sub(r'(\w+) = "tml-…"', r'\1 = "tml-\1-and-more"', block))
    assert load_settings(tmp_path / "descant.toml").models == ("smollm2",)
