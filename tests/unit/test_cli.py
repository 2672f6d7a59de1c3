"""The command line: what is refused, how it is said, and with which code."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from descant.cli import LogFormatter, main


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["serve"], "name a model to serve", id="no model"),
        pytest.param(["serve", "m", "--set", "server.prot=1"], "the nearest is 'server.port'", id="unknown setting"),
        pytest.param(["serve", "m", "--set", "server.port=x"], "'x' is not a whole number", id="wrong type"),
        pytest.param(["serve", "m", "--port", "70000"], "server.port is 70000, expected 0 to 65535", id="port"),
        pytest.param(["serve", "m", "--host", "0.0.0.0"], "there are no API keys", id="open to the world"),
        pytest.param(["serve", "m", "--config", "/nonexistent.toml"], "cannot read /nonexistent.toml", id="no file"),
        pytest.param(["serve", "m", "m"], "models names a model twice: m, m", id="twice"),
        pytest.param(["bench", "speed"], "there is no measurement 'speed'", id="unknown measurement"),
    ],
)
def test_a_user_error_is_one_sentence_and_code_2(arguments: list[str], says: str):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_flags_win_over_set_and_set_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tmp_path / "descant.toml"
    config.write_text('models = ["from-file"]\n[server]\nport = 1\nhost = "127.0.0.2"\n')
    seen = []
    monkeypatch.setattr("descant.app.run", lambda settings, started: seen.append(settings))
    arguments = ["serve", "from-flag", "--config", str(config), "--port", "2", "--set", "server.port=3"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert (seen[0].models, seen[0].server.port, seen[0].server.host) == (("from-flag",), 2, "127.0.0.2")


def test_version():
    result = CliRunner().invoke(main, ["--version"])
    assert result.output.startswith("descant 0.")


def test_nobody_whose_text_is_logged_can_begin_a_line_or_go_back_on_one():
    formatter = LogFormatter("%(levelname)s %(name)s: %(message)s")
    text = "a\rINFO x: forged\nINFO x: forged\x1b[31m\x00\x85\u2028é\tb"
    record = logging.LogRecord("n", logging.INFO, "", 1, "got %s", (text,), None)
    assert formatter.format(record) == (
        "INFO n: got a\\rINFO x: forged\n  INFO x: forged\\x1b[31m\\x00\\x85\\u2028é\tb"
    )
    try:
        raise ValueError(text)
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "", 1, "failed", (), sys.exc_info())
    lines = formatter.format(record).split("\n")
    assert all(line.startswith("  ") for line in lines[1:])
    assert not any(character in "".join(lines) for character in "\r\x1b\x00\x85\u2028")
