"""``descant serve | doctor | demo | bench | checkpoints``. Parses, prints, and turns every error into one sentence; the
work is elsewhere.

Exit codes: 0 done, 1 our fault or the machine's, 2 something to correct in what was asked. Ctrl-C and SIGTERM stop a
server within ``server.graceful_stop_s``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from descant import __version__
from descant.config import Settings, check, load_settings
from descant.errors import DescantError, UserError

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
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    from descant import app  # the web framework loads here, after what can be refused was refused

    app.run(settings, started=_print_started)


class LogFormatter(logging.Formatter):
    """Nobody whose text is logged (a name, a rank's last words) can begin a line, go back on one or colour it."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).split("\n")
        return "\n  ".join(_CONTROL.sub(lambda found: repr(found[0])[1:-1], line) for line in lines)


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


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


DATA_DIR = click.option(
    "--data-dir", type=click.Path(path_type=Path), metavar="DIR", help="The server's.  [default: as serve's]"
)


@main.group()
def checkpoints() -> None:
    """Adapters that leave and come, with or without a server that runs."""


AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def out_of_the_store(command: Callable[..., None]) -> Callable[..., None]:
    """The arguments and options of what writes a checkpoint elsewhere."""
    options = (
        click.argument("checkpoint", metavar="CHECKPOINT"),
        click.argument("dest", metavar="DEST", type=click.Path(path_type=Path)),
        click.option("--verify", is_flag=True, help="Load it, and compare its log-probabilities with ours."),
        click.option("--tolerance", type=float, help="In nats.  [default: 0.001; merged into half precision 0.25]"),
        click.option("--base", metavar="MODEL", help="Where the base model is, if not where the checkpoint says."),
        AS_JSON,
        DATA_DIR,
        one_sentence,
    )
    for option in reversed(options):
        command = option(command)
    return command


@checkpoints.command("ls")
@AS_JSON
@DATA_DIR
@one_sentence
def list_checkpoints(as_json: bool, data_dir: Path | None) -> None:
    """The checkpoints of a server, the newest first."""
    from descant import checkpoints as module
    from descant.types import Lora, trainable_to_json

    found = module.checkpoints(data_dir or Settings().data_dir)
    if as_json:
        print_json(
            [
                {
                    "path": checkpoint.name.uri,
                    "owner": checkpoint.manifest.owner,
                    "base": checkpoint.manifest.base,
                    "trainable": trainable_to_json(checkpoint.manifest.trainable),
                    "step": checkpoint.manifest.step,
                    "has_optimizer": checkpoint.manifest.has_optimizer,
                    "size_bytes": checkpoint.manifest.size_bytes,
                }
                for checkpoint in found
            ]
        )
        return
    for checkpoint in found:
        manifest = checkpoint.manifest
        trained = f"rank {manifest.trainable.rank}" if isinstance(manifest.trainable, Lora) else manifest.trainable.kind
        print(f"{checkpoint.name.uri}\t{manifest.owner}\t{manifest.base}\t{trained}")


@checkpoints.command("verify")
@click.argument("wanted", metavar="[CHECKPOINT]...", nargs=-1)
@AS_JSON
@DATA_DIR
@one_sentence
def verify_checkpoints(wanted: tuple[str, ...], as_json: bool, data_dir: Path | None) -> None:
    """Read all of each CHECKPOINT (a tinker:// path, or its directory), or of all, and say which are damaged."""
    from descant import checkpoints as module

    verdicts = []
    for verdict in module.verify(wanted, data_dir=data_dir or Settings().data_dir):
        verdicts.append(verdict)
        if not as_json:
            print(f"{verdict.what}\t{verdict.error or 'whole'}")
    if as_json:
        print_json([asdict(verdict) for verdict in verdicts])
    if any(verdict.error is not None for verdict in verdicts):
        sys.exit(1)


@checkpoints.command("gc")
@AS_JSON
@DATA_DIR
@one_sentence
def collect_garbage(as_json: bool, data_dir: Path | None) -> None:
    """Remove what saves have left that did not come to their end. No server may run: one does it when it starts."""
    from descant import checkpoints as module
    from descant.app import CHECKPOINTS, SNAPSHOTS, only_server_of

    directory = data_dir or Settings().data_dir
    if not directory.is_dir():
        raise UserError(f"there is no directory {directory}; name a server's data_dir with --data-dir")
    with only_server_of(directory):
        removed = module.remove_leftovers([directory / CHECKPOINTS, directory / SNAPSHOTS])
    if as_json:
        print_json(asdict(removed))
    else:
        print(f"removed {removed.count} attempts, {removed.num_bytes} bytes")


@checkpoints.command("export")
@out_of_the_store
def export_checkpoint(**options: Any) -> None:
    """Write CHECKPOINT (a tinker:// path, or its directory) to DEST, as PEFT and others read it."""
    _export(merge=False, **options)


@checkpoints.command("merge")
@out_of_the_store
def merge_checkpoint(**options: Any) -> None:
    """Write the base of CHECKPOINT (a tinker:// path, or its directory) with the adapter in its weights to DEST."""
    _export(merge=True, **options)


def _export(
    *,
    checkpoint: str,
    dest: Path,
    merge: bool,
    verify: bool,
    tolerance: float | None,
    base: str | None,
    as_json: bool,
    data_dir: Path | None,
) -> None:
    from descant import checkpoints as module

    verdict = module.export(
        checkpoint,
        dest,
        data_dir=data_dir or Settings().data_dir,
        base=base,
        merge=merge,
        verify=verify,
        tolerance=tolerance,
    )
    if as_json:
        print_json({"dest": str(dest), "verified": None if verdict is None else asdict(verdict)})
    elif verdict is not None:
        print(
            f"log-probabilities of {verdict.num_tokens} tokens differ by at most {verdict.difference:.2g} nats "
            f"(allowed {verdict.tolerance:.2g}; the base alone {verdict.without:.2g})"
        )
    if verdict is not None and not verdict.holds:
        errors.print(f"descant: {dest} does not compute what was served", style="red", markup=False)
        sys.exit(1)


def print_json(found: object) -> None:
    print(json.dumps(found, indent=2))


@checkpoints.command("import")
@click.argument("directory", metavar="PEFT_DIR", type=click.Path(path_type=Path))
@click.option("--base", metavar="MODEL", required=True, help="The base model, as serve is told it.")
@click.option("--owner", metavar="NAME", help="Whose it will be, as in auth.keys.  [default: $TINKER_API_KEY's]")
@click.option("--name", default="imported", show_default=True, help="The checkpoint's name.")
@AS_JSON
@DATA_DIR
@one_sentence
def import_checkpoint(
    directory: Path, base: str, owner: str | None, name: str, as_json: bool, data_dir: Path | None
) -> None:
    """Make a checkpoint of an adapter that PEFT has written. Prints its tinker:// path."""
    from descant import checkpoints as module
    from descant.server.auth import API_KEY_HEADER, Keys

    if owner is None:
        key = os.environ.get("TINKER_API_KEY")
        if not key:
            raise click.UsageError("say whose it will be: --owner with a name of auth.keys, or TINKER_API_KEY")
        owner = Keys().principal({API_KEY_HEADER: key})
    imported = module.import_peft(
        directory, data_dir=data_dir or Settings().data_dir, base=base, owner=owner, name=name
    )
    if as_json:
        print_json({"path": imported.checkpoint.name.uri, "notes": imported.notes})
        return
    for note in imported.notes:
        errors.print(f"descant: {note}", markup=False)
    print(imported.checkpoint.name.uri)


if __name__ == "__main__":
    main()
