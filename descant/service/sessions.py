"""Which sessions are open, and when each was last heard of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from descant.errors import Gone, NotFound
from descant.ports import Clock
from descant.service.catalogue import Catalogue, SessionRecord


@dataclass(slots=True, eq=False)
class Session:
    """A session that is open, in memory. ``over``: why it is not any more; it leaves memory once that is written."""

    record: SessionRecord
    last_seen: float
    samplers: set[str] = field(default_factory=set)
    over: str | None = None


class Sessions:
    """Owns the open sessions in memory; the catalogue has them all. What lives in a session is others' to end."""

    def __init__(self, *, catalogue: Catalogue, clock: Clock):
        self._catalogue = catalogue
        self._clock = clock
        self._open: dict[str, Session] = {}

    async def recover(self) -> None:
        """Those that were open when the server ended."""
        now = self._clock.monotonic()
        for record in await self._catalogue.open_sessions():
            # While the server was down nobody could beat: the time counts anew.
            self._open[record.session_id] = Session(record=record, last_seen=now)

    async def add(self, record: SessionRecord, *, idempotency_key: str | None) -> str:
        """Its id, or that of the session that stands under the ``idempotency_key`` already."""
        stands = await self._catalogue.add_session(record, idempotency_key=idempotency_key)
        if stands.ended_at is None:
            self._open.setdefault(stands.session_id, Session(record=stands, last_seen=self._clock.monotonic()))
        return stands.session_id

    async def find(self, principal: str, session_id: str) -> Session:
        """An open session of this principal, which has hereby been heard of.

        Raises ``NotFound`` for one that never was or is somebody else's, ``Gone`` for one that is over."""
        session = self._open.get(session_id)
        record = session.record if session is not None else await self._catalogue.session(session_id)
        if record is None or record.owner != principal:
            raise NotFound(f"no session {session_id!r}")
        if session is None or session.over is not None:
            raise Gone(f"session {session_id!r} is over: {record.end_reason or (session and session.over)}")
        session.last_seen = self._clock.monotonic()
        return session

    def get(self, session_id: str) -> Session | None:
        """One that is open or just ending, whoever owns it."""
        return self._open.get(session_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._open.values()))

    async def end(self, session: Session, reason: str) -> None:
        """Writes that it is over. It has left memory even if that fails."""
        session_id = session.record.session_id
        try:
            await self._catalogue.end_session(session_id, ended_at=self._clock.now(), reason=reason)
        finally:
            del self._open[session_id]
