"""Seeds from what they are for. Two purposes or two places never share one by accident; the same ones always do."""

from __future__ import annotations

import hashlib
import json


def derive_seed(root: int, purpose: str, **coordinates: int | str) -> int:
    """A seed in [0, 2**63) from the run's ``root``, a ``purpose`` ("dropout", "shuffle") and where it is used.

    Coordinates say what must differ (``replica=1, step=7``); what must be the same on several ranks is left out.
    """
    text = json.dumps([root, purpose, sorted(coordinates.items())], separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
