"""Every error that crosses a package.

    DescantError
    ├─ UserError            400  the caller sent something that cannot be done; nothing was changed
    │  ├─ Unauthorized      401
    │  ├─ QuotaExceeded     403  an owner has as much as one may have; says of what, and what makes room
    │  ├─ NotFound          404
    │  ├─ Gone              410  a session that is over
    │  └─ Damaged           400  a checkpoint that cannot be read, or whose files are not what was saved
    ├─ Overloaded           429  try again later; ``retry_after_s``
    └─ ServerError          500  our fault or the machine's
       ├─ CannotStore       400  the data directory takes nothing: it is full, or cannot be written. No 5xx: those
       │                         clients send again and again without a word
       ├─ RankDied          500  a rank ended or stopped answering; names the rank and what it ran
       ├─ DistributedFailure 500 (``distributed.failure``) ranks failed together: who, where, why, the same on each
       └─ Lost              500  a model or weights that could not be made again after a death; names where to resume

``category`` is the word the Tinker protocol puts into a failed future ("user" or "server"). All of them pickle,
since they travel from rank to server. A message says expected, got and where:
``data[3].loss_fn_inputs['weights'] has shape (3,), expected (2,)``.
"""

from __future__ import annotations

from typing import ClassVar


class DescantError(Exception):
    """Base of the tree. ``str(error)`` is one sentence that may be shown to a client."""

    category: ClassVar[str] = "server"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class UserError(DescantError):
    category = "user"
    http_status = 400


class Unauthorized(UserError):
    http_status = 401


class QuotaExceeded(UserError):
    http_status = 403


class NotFound(UserError):
    http_status = 404


class Gone(UserError):
    http_status = 410


class Damaged(UserError):
    pass


class Overloaded(DescantError):
    http_status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type, tuple[str, float]]:
        return type(self), (self.message, self.retry_after_s)


class ServerError(DescantError):
    pass


class CannotStore(ServerError):
    http_status = 400


class RankDied(ServerError):
    pass


class Lost(ServerError):
    pass
