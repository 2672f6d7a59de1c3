"""Ids and names as the protocol writes them. Pure."""

from __future__ import annotations

import re

from descant.errors import UserError
from descant.types import CheckpointName, CheckpointType

MAX_NAME_LENGTH = 128

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Begins with a letter or digit: no hidden file, no ``..``, nothing a command line takes for an option."""

_TYPES: dict[str, CheckpointType] = {"weights": "weights", "sampler_weights": "sampler_weights"}


def model_id_of(session_id: str, model_seq_id: int) -> str:
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id_of(session_id: str, sampling_session_seq_id: int) -> str:
    return f"{session_id}:sample:{sampling_session_seq_id}"


def session_id_of(id_: str) -> str:
    """The session that a model or a sampling session is in."""
    return id_.partition(":")[0]


def check_checkpoint_name(name: str) -> str:
    """``name``, or ``UserError``. It becomes a directory and the last of a path's three segments."""
    if not name:
        raise UserError("the checkpoint's name is empty, expected 1 to 128 characters")
    if len(name) > MAX_NAME_LENGTH:
        raise UserError(f"the checkpoint's name has {len(name)} characters, expected at most {MAX_NAME_LENGTH}")
    if not _NAME.fullmatch(name):
        raise UserError(
            f"the checkpoint's name is {name!r}, expected letters, digits, '.', '_' and '-', beginning with a letter "
            "or digit"
        )
    return name


def parse_path(path: str) -> CheckpointName:
    """The checkpoint that a ``tinker://`` path names. Raises ``UserError``."""
    expected = "expected tinker://MODEL_ID/weights/NAME or tinker://MODEL_ID/sampler_weights/NAME"
    if not path.startswith("tinker://"):
        raise UserError(f"the path is {path[:200]!r}, {expected}")
    segments = path.removeprefix("tinker://").split("/")
    if len(segments) != 3 or segments[1] not in _TYPES or not re.fullmatch(r"[A-Za-z0-9:_-]+", segments[0]):
        raise UserError(f"the path is {path[:200]!r}, {expected}")
    return CheckpointName(model_id=segments[0], type=_TYPES[segments[1]], name=check_checkpoint_name(segments[2]))
