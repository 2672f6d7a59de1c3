"""One frozen tree of settings: defaults, then a TOML file, then ``--set a.b=c``.

Each package keeps its own settings beside the code that obeys them; this file composes them. The tree is the schema:
a field's type says how ``--set`` parses it, an unknown key is an error that names the nearest one, and a value of
another type is an error that says which was expected.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from descant.ckpt.remote import check_url
from descant.ckpt.settings import CheckpointSettings
from descant.errors import UserError
from descant.ranks.settings import (
    LossSettings,
    OffloadSettings,
    ParallelSettings,
    RankSettings,
    RaySettings,
    ReplicaSettings,
    SampleSettings,
    SpeculativeSettings,
    TrainSettings,
)
from descant.server.connections import networks
from descant.server.settings import HttpSettings
from descant.service.settings import QuotaSettings, ServiceSettings

API_KEY_PREFIX = "tml-"
"""The SDK refuses locally any key that does not begin so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: the operating system chooses."""
    graceful_stop_s: int = 10
    """How long requests that work may take to end after SIGTERM before they are cut. Open long polls end at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    """Who may use the server. No keys at all: every API key is an owner of its own (loopback only)."""

    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Owner's name to API key."""
    keys_file: Path | None = None
    """A TOML file of lines ``name = "tml-…"``, beside ``keys``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    models: tuple[str, ...] = ()
    """``smollm2``, a directory, or a hub name, each served as a base of its own."""
    data_dir: Path = field(default_factory=lambda: default_data_dir())
    """Checkpoints, results and the database; one server at a time."""
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    auth: AuthSettings = field(default_factory=AuthSettings)
    service: ServiceSettings = field(default_factory=ServiceSettings)
    quota: QuotaSettings = field(default_factory=QuotaSettings)
    rank: RankSettings = field(default_factory=RankSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    sample: SampleSettings = field(default_factory=SampleSettings)
    speculative: SpeculativeSettings = field(default_factory=SpeculativeSettings)
    offload: OffloadSettings = field(default_factory=OffloadSettings)
    ray: RaySettings = field(default_factory=RaySettings)
    losses: LossSettings = field(default_factory=LossSettings)

    @property
    def replica(self) -> ReplicaSettings:
        """What travels to every rank."""
        return ReplicaSettings(
            rank=self.rank,
            parallel=self.parallel,
            train=self.train,
            sample=self.sample,
            speculative=self.speculative,
            offload=self.offload,
        )

    def owners_by_key(self) -> Mapping[str, str]:
        """API key to owner's name, from ``auth.keys`` and ``auth.keys_file``. Empty: open. Raises ``UserError``."""
        names = dict(self.auth.keys)
        if self.auth.keys_file is not None:
            for name, key in _read_toml(self.auth.keys_file).items():
                if not isinstance(key, str):
                    raise UserError(f"{self.auth.keys_file}: {name} is {_kind(key)}, expected text (an API key)")
                if names.setdefault(name, key) != key:
                    raise UserError(f"auth.keys and {self.auth.keys_file} give {name!r} two different keys")
        owners: dict[str, str] = {}
        for name, key in names.items():
            if not key.startswith(API_KEY_PREFIX) or len(key) < len(API_KEY_PREFIX) + 8:
                raise UserError(
                    f"auth.keys.{name}: expected {API_KEY_PREFIX!r} and at least 8 more characters "
                    "(the tinker SDK refuses other keys)"
                )
            if key in owners:
                raise UserError(f"auth.keys: {owners[key]!r} and {name!r} have the same key")
            owners[key] = name
        return owners


def default_data_dir() -> Path:
    """``$XDG_DATA_HOME/descant``, or ``~/.local/share/descant``."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "descant"


# --------------------------------------------------------------------------------------------------------------------
# Loading


def load_settings(config: Path | None = None, overrides: Sequence[str] = (), base: Settings | None = None) -> Settings:
    """``base`` (the defaults if None), then the file, then each ``a.b=c``; checked as a whole. Raises ``UserError``."""
    settings = base or Settings()
    if config is not None:
        settings = _merge(settings, _read_toml(config), where=str(config))
    for override in overrides:
        settings = _override(settings, override)
    check(settings)
    return settings


def check(settings: Settings) -> None:
    """What no single field can tell. Raises ``UserError`` naming the setting and what to set instead."""
    for key, value in leaves(settings):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key} is {value}, expected a finite number")
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0 and key != "server.port":
            raise UserError(f"{key} is {value}, expected a number above 0")
    server = settings.server
    if not 0 <= server.port <= 65535:
        raise UserError(f"server.port is {server.port}, expected 0 to 65535 (0: the system chooses)")
    try:
        networks(settings.http.trusted_proxies)
    except UserError as error:
        raise UserError(f"http.trusted_proxies: {error}") from None
    if settings.checkpoints.url is not None:
        check_url(settings.checkpoints.url)
    if settings.http.long_poll_s > 40:
        raise UserError(f"http.long_poll_s is {settings.http.long_poll_s}, expected at most 40 (the SDK waits 45 s)")
    if not settings.owners_by_key() and not is_loopback(server.host):
        raise UserError(
            f"server.host is {server.host!r}, which others can reach, and there are no API keys: "
            "set auth.keys or auth.keys_file, or serve on 127.0.0.1"
        )
    if settings.sample.batch_invariant and settings.speculative.method != "none":
        raise UserError(
            f"speculative.method is {settings.speculative.method!r} and sample.batch_invariant is true: draft tokens "
            "are computed together, output tokens one by one; set one of the two"
        )
    parallel = settings.parallel
    if (parallel.train_replicas is None) != (parallel.sample_replicas is None):
        there, absent = ("train", "sample") if parallel.sample_replicas is None else ("sample", "train")
        raise UserError(
            f"parallel.{there}_replicas is set and parallel.{absent}_replicas is not: set both, or neither for "
            "replicas that do both (parallel.replicas)"
        )
    if parallel.replicas is not None and parallel.train_replicas is not None:
        raise UserError(
            "parallel.replicas is set beside parallel.train_replicas and parallel.sample_replicas: set it for replicas "
            "that do both, or the two others for replicas that do one"
        )
    if len(set(settings.models)) != len(settings.models):
        raise UserError(f"models names a model twice: {', '.join(settings.models)}")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting as (dotted key, value)."""
    for item in fields(tree):
        value = getattr(tree, item.name)
        key = prefix + item.name
        if is_dataclass(value):
            yield from leaves(value, key + ".")
        else:
            yield key, value


def _read_toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"cannot read {path}: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from None


def _merge(tree: Any, values: Mapping[str, Any], *, where: str, prefix: str = "") -> Any:
    """``tree`` with the values of a TOML table in place of its own."""
    hints = typing.get_type_hints(type(tree))
    changes: dict[str, Any] = {}
    for name, value in values.items():
        key = prefix + name
        if name not in hints:
            raise _unknown(key, where)
        old = getattr(tree, name)
        if is_dataclass(old):
            if not isinstance(value, Mapping):
                raise UserError(f"{where}: {key} is {_kind(value)}, expected a table")
            changes[name] = _merge(old, value, where=where, prefix=key + ".")
        else:
            changes[name] = _typed(value, hints[name], key=key, where=where)
    return replace(tree, **changes)


def _override(settings: Settings, override: str) -> Settings:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"--set {override!r}: expected KEY=VALUE")
    path = key.split(".")
    tree: Any = settings
    for depth, name in enumerate(path):
        hints = typing.get_type_hints(type(tree))
        if name not in hints:
            raise _unknown(key, "--set")
        below = getattr(tree, name)
        rest = path[depth + 1 :]
        if is_dataclass(below):
            if not rest:
                raise UserError(f"--set {key}: expected one of {', '.join(k for k, _ in leaves(below, key + '.'))}")
            tree = below
            continue
        if isinstance(below, Mapping) and len(rest) == 1:  # auth.keys.alice=tml-…
            value: Any = {**below, rest[0]: text}
        elif rest:
            raise _unknown(key, "--set")
        else:
            value = _parse(text, hints[name], key=key)
        nested: Any = {name: value}
        for outer in reversed(path[:depth]):
            nested = {outer: nested}
        return typing.cast(Settings, _replace(settings, nested))
    raise _unknown(key, "--set")


def _replace(tree: Any, changes: Mapping[str, Any]) -> Any:
    """``dataclasses.replace`` down a tree of them."""
    return replace(
        tree,
        **{
            name: _replace(getattr(tree, name), value) if is_dataclass(getattr(tree, name)) else value
            for name, value in changes.items()
        },
    )


def _unknown(key: str, where: str) -> UserError:
    """Names the setting of the same last word, whatever its group; else the nearest: of a dotted key by its last word.
    Two groups that have that word are both named."""
    known = [name for name, _ in leaves(Settings())]
    group, _, word = key.rpartition(".")
    by_word = {name: name.rpartition(".")[2] for name in known}
    if word not in by_word.values() and group:
        [word] = difflib.get_close_matches(word, by_word.values(), n=1, cutoff=0.0)
    same = [name for name in known if by_word[name] == word]
    near = same or difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return UserError(f"{where}: there is no setting {key!r}; the nearest is {' or '.join(map(repr, near))}")


# --------------------------------------------------------------------------------------------------------------------
# Types


def _optional(hint: Any) -> tuple[Any, bool]:
    """``X | None`` as (X, True)."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return inner[0], True
    return hint, False


def _typed(value: Any, hint: Any, *, key: str, where: str) -> Any:
    """A TOML value as the field's type. An integer is a float too; nothing else is converted."""
    wanted, _ = _optional(hint)
    origin = typing.get_origin(wanted)
    if wanted is Path and isinstance(value, str):
        return Path(value).expanduser()
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if origin in (Mapping, typing.get_origin(Mapping[str, str])) and isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(item, str):
                raise UserError(f"{where}: {key}.{name} is {_kind(item)}, expected text")
        return dict(value)
    if typing.get_origin(wanted) is typing.Literal and value in typing.get_args(wanted):
        return value
    if isinstance(wanted, type) and type(value) is wanted:
        return value
    raise UserError(f"{where}: {key} is {_kind(value)}, expected {_expected(wanted)}")


def _parse(text: str, hint: Any, *, key: str) -> Any:
    """The text of ``--set`` as the field's type."""
    wanted, optional = _optional(hint)
    if optional and text in ("", "none"):
        return None
    try:
        if wanted is bool:
            return {"true": True, "false": False}[text.lower()]
        if wanted is int:
            return int(text)
        if wanted is float:
            return float(text)
    except (ValueError, KeyError):
        raise UserError(f"--set {key}={text}: {text!r} is not {_expected(wanted)}") from None
    if typing.get_origin(wanted) is tuple:
        return tuple(part for part in text.split(",") if part)
    if typing.get_origin(wanted) is not None and typing.get_origin(wanted) is not typing.Literal:
        raise UserError(f"--set {key}={text}: expected {key}.NAME=VALUE")
    return _typed(text, hint, key=key, where="--set")


def _kind(value: Any) -> str:
    for cls, name in (
        (bool, "true or false"),
        (str, "text"),
        (int, "a whole number"),
        (float, "a number"),
        (list, "a list"),
        (Mapping, "a table"),
    ):
        if isinstance(value, cls):
            return name
    return f"a {type(value).__name__}"


def _expected(wanted: Any) -> str:
    names = {bool: "true or false", str: "text", int: "a whole number", float: "a number", Path: "a path (text)"}
    if wanted in names:
        return names[wanted]
    if typing.get_origin(wanted) is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(wanted)))
    return "a list of texts" if typing.get_origin(wanted) is tuple else "a table of texts"
