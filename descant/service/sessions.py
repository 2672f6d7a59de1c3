"""Which sessions are open, and whose they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from descant.errors import Gone, NotFound
from descant.ports import Clock
from descant.service.liveness import Liveness
from descant.service.quotas import Quotas
from descant.service.registry import Registry, SessionRecord


@dataclass(slots=True, eq=False)
class Session:
    """A session that is open, in memory. ``over``: why it is not any more; it leaves memory once that is written."""

    record: SessionRecord
    samplers: set[str] = field(default_factory=set)
    over: str | None = None


class Sessions:
    """Owns the open sessions in memory; the registry has them all. What lives in a session is others' to end."""

    def __init__(self, *, registry: Registry, clock: Clock, liveness: Liveness, quotas: Quotas):
        self._registry = registry
        self._clock = clock
        self._liveness = liveness
        self._quotas = quotas
        self._open: dict[str, Session] = {}
        self._of_owner: Counter[str] = Counter()
        """Those that are being made count as well."""

    async def recover(self) -> None:
        """Those that were open when the server ended."""
        for record in await self._registry.open_sessions():
            # Its silence counts from here: while the server was down no heartbeat could arrive.
            self._of_owner[record.owner] += 1
            self._enter(record)

    async def add(self, record: SessionRecord, *, idempotency_key: str | None) -> str:
        """Its id, or that of the session that stands under the ``idempotency_key`` already. Raises
        ``QuotaExceeded``."""
        if idempotency_key is not None:
            stands = await self._registry.session_of_key(record.owner, idempotency_key)
            if stands is not None:
                return stands.session_id
        self._quotas.check_sessions(self._of_owner[record.owner])
        self._of_owner[record.owner] += 1
        added = False
        try:
            stands = await self._registry.add_session(record, idempotency_key=idempotency_key)
            added = stands.session_id == record.session_id
        finally:
            if not added:
                self._leave(record.owner)
        if added:
            self._enter(record)
        return stands.session_id

    async def find(self, principal: str, session_id: str) -> Session:
        """An open session of this principal, which has hereby been heard of.

        Raises ``NotFound`` for one that never was or is another owner's, ``Gone`` for one that is over."""
        session = self._open.get(session_id)
        record = session.record if session is not None else await self._registry.session(session_id)
        if record is None or record.owner != principal:
            raise NotFound(f"no session {session_id!r}")
        if session is None or session.over is not None:
            raise Gone(f"session {session_id!r} is over: {record.end_reason or (session and session.over)}")
        self._liveness.heard(session_id)
        return session

    def get(self, session_id: str) -> Session | None:
        """One that is open or just ending, of any owner."""
        return self._open.get(session_id)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    async def end(self, session: Session, reason: str) -> None:
        """Writes that it is over. It has left memory even if that fails."""
        session_id = session.record.session_id
        try:
            await self._registry.end_session(session_id, ended_at=self._clock.now(), reason=reason)
        finally:
            del self._open[session_id]
            self._liveness.closed(session_id)
            self._leave(session.record.owner)

    # ----------------------------------------------------------------------------------------------------------------

    def _enter(self, record: SessionRecord) -> None:
        self._open[record.session_id] = Session(record=record)
        self._liveness.opened(record.session_id)

    def _leave(self, owner: str) -> None:
        self._of_owner[owner] -= 1
        if not self._of_owner[owner]:
            del self._of_owner[owner]
