"""Who is calling: an API key → its owner.

Keys are compared by digest, so that no secret is kept in memory longer than the request, and none is ever logged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from descant.errors import Unauthorized

API_KEY_HEADER = "x-api-key"


class Keys:
    """``owners``: API key → owner. Without any, every key is let in and is its own owner."""

    def __init__(self, owners: Mapping[str, str] | None = None):
        self._owners = {_digest(key): owner for key, owner in (owners or {}).items()}

    def principal(self, headers: Mapping[str, str]) -> str:
        """The owner of the request's ``X-API-Key``. Raises ``Unauthorized``."""
        key = headers.get(API_KEY_HEADER, "")
        if not key:
            raise Unauthorized("the header X-API-Key is missing")
        digest = _digest(key)
        if not self._owners:
            return f"key-{digest[:16]}"
        owner = self._owners.get(digest)
        if owner is None:
            raise Unauthorized("the API key in the header X-API-Key is not known here")
        return owner


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
