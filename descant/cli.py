"""``descant serve | doctor | demo | bench``. Parses, prints, and turns every error into one sentence; the work is
elsewhere.

Exit codes: 0 done, 1 our fault or the machine's, 2 something to correct in what was asked. Ctrl-C and SIGTERM stop a
server within ``server.graceful_stop_s``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from descant import __version__
from descant.config import Settings, check, load_settings
from descant.errors import DescantError

errors = Console(stderr=True, highlight=False, soft_wrap=True)


def one_sentence(command: Callable[..., None]) -> Callable[..., None]:
    """A ``DescantError`` ends the command in red, without a traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except DescantError as error:
            errors.print(f"descant: {error}", style="red", markup=False)
            sys.exit(2 if error.category == "user" else 1)
        except KeyboardInterrupt:
            sys.exit(130)

    return run


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="descant", message="%(prog)s %(version)s")
def main() -> None:
    """Many people fine-tune and sample their own adapters on one shared base model, through the public Tinker SDK."""


@main.command()
@click.argument("models", metavar="MODEL...", nargs=-1)
@click.option("--host", help="Address to listen on. Anything but loopback needs API keys.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on; 0 lets the system choose.  [default: 8000]")
@click.option("--ray", metavar="ADDRESS", help="Ranks on this Ray cluster: host:port of its head, or auto.")
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="Settings as TOML.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="One setting; may be repeated.")
@one_sentence
def serve(
    models: tuple[str, ...],
    host: str | None,
    port: int | None,
    ray: str | None,
    config: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Serve base models: smollm2, a model's directory, or a hub name."""
    flags = [
        *([f"server.host={host}"] if host is not None else []),
        *([f"server.port={port}"] if port is not None else []),
        *([f"ray.address={ray}"] if ray is not None else []),
    ]
    settings = load_settings(config, [*overrides, *flags])
    if models:
        settings = replace(settings, models=models)
        check(settings)
    if not settings.models:
        raise click.UsageError("name a model to serve: smollm2, a directory, or a hub name")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    from descant import app  # the web framework loads here, after what can be refused was refused

    app.run(settings, started=_print_started)


def _print_started(url: str, models: tuple[str, ...], settings: Settings) -> None:
    """The lines a person, and a script that started us, waits for."""
    host_needs_key = bool(settings.owners_by_key())
    print(f"Descant serves {', '.join(models)} at {url}")
    print(f"  data in {settings.data_dir}")
    print(f"  export TINKER_BASE_URL={url}")
    print(f"  export TINKER_API_KEY={'(one of auth.keys)' if host_needs_key else 'tml-anything-you-like'}", flush=True)


@main.command()
@click.option("--url", help="The server to ask.  [default: $TINKER_BASE_URL, else http://127.0.0.1:8000]")
@click.option("--data-dir", type=click.Path(path_type=Path), metavar="DIR", help="Without a server: its last failure.")
@one_sentence
def doctor(url: str | None, data_dir: Path | None) -> None:
    """What each replica of a server does, and how the last one that failed did. Exits with 1 if something is wrong."""
    if url is not None and data_dir is not None:
        raise click.UsageError("--url asks a server, --data-dir looks where none runs; give one of them")
    from descant.doctor import run_doctor

    url = url or os.environ.get("TINKER_BASE_URL") or "http://127.0.0.1:8000"
    sys.exit(run_doctor(url=url, data_dir=data_dir, api_key=os.environ.get("TINKER_API_KEY", "tml-doctor")))


@main.command()
@click.option("--model", default="smollm2", show_default=True, help="The base model to train adapters of.")
@one_sentence
def demo(model: str) -> None:
    """Two clients train their own adapters of one model at the same time."""
    from descant.demo import run_demo

    sys.exit(run_demo(model))


@main.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the rows there too.")
@click.option("--model", default="smollm2", show_default=True, help="The base model to measure on.")
@one_sentence
def bench(names: tuple[str, ...], json_file: Path | None, model: str) -> None:
    """Measure, each number beside its baseline in the same run."""
    from descant.bench import run_bench

    run_bench(names, model=model, json_file=json_file)


if __name__ == "__main__":
    main()
