"""The protocol's futures as their clients see them: accepted, polled, cancelled, abandoned."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from descant.errors import Gone, NotFound, ServerError, UserError
from descant.ports import Clock, FutureStore
from descant.service.jobs import Job, Jobs
from descant.service.liveness import Liveness, client_of
from descant.types import CommandRecord, FutureKey, FutureState

log = logging.getLogger(__name__)

MAX_ABANDONED = 1 << 16
"""Sampling requests of which it is remembered that they were abandoned."""

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The immediate answer to a request that ends in a future."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A future that has not ended: ``reason`` says in a sentence what runs now and how much is ahead."""

    request_id: str
    queue_state: QueueState
    reason: str


class FutureService:
    """Owns which requests were abandoned because no client polled, and which answers were fetched. What a request does,
    and how it ends, is the affair of its ``Job`` and of the caller that had it accepted."""

    def __init__(
        self,
        *,
        store: FutureStore,
        jobs: Jobs,
        liveness: Liveness,
        clock: Clock,
        reason: Callable[[Job], str],
    ):
        """``reason`` says in a sentence why a job has not ended."""
        self._store = store
        self._jobs = jobs
        self._liveness = liveness
        self._clock = clock
        self._reason = reason
        self._abandoned: dict[str, None] = {}
        """The latest sampling requests whose clients did not poll any more."""
        self._interrupted: frozenset[str] = frozenset()
        """Sampling requests that did not end before an earlier server did: their clients send them again."""
        self._fetched: dict[str, float] = {}
        """Answers that clients have been given, and when first; the longest ago first."""

    async def accept(
        self,
        *,
        key: FutureKey,
        owner: str,
        base: str,
        operation: str,
        begin: Callable[[str], None],
        not_begun: Callable[[], None] | None = None,
        command: CommandRecord | None = None,
    ) -> str:
        """The future of a submission. ``begin`` is called with its id if it is new, and only then: of the same request
        sent twice, one begins. Client gone or not, what is in the store is begun. ``command`` is kept with it."""

        self._liveness.heard_from(client_of(key))

        async def put() -> str:
            new = False
            try:
                request_id, new = await self._store.put(
                    key=key, owner=owner, base=base, operation=operation, command=command
                )
            finally:
                if not new and not_begun is not None:
                    not_begun()
            if new:
                begin(request_id)
            else:
                self._liveness.sent_again(request_id)
            return request_id

        return await asyncio.shield(self._jobs.spawn(put()))

    async def retrieve_future(self, principal: str, request_id: str, *, timeout_s: float) -> FutureState | Pending:
        """Waits up to ``timeout_s``. Raises ``NotFound`` for an id this principal does not own, ``Gone`` for a sampling
        request that was abandoned because its client did not poll: the client sends it again."""
        state = await self._future(principal, request_id)
        client = client_of(state.key)
        if request_id in self._interrupted:
            timeout_s = 0.0
        with self._liveness.polling(client, request_id):
            if state.encoded is None and timeout_s > 0:
                state = await self._store.get(request_id, timeout_s=timeout_s)
        if request_id in self._interrupted:
            raise Gone(f"request {request_id!r} did not end before the server was restarted; send it again")
        if request_id in self._abandoned:
            self._liveness.came_back(client.session_id)
            raise Gone(f"request {request_id!r} was abandoned, since its client did not poll for it; send it again")
        if state.encoded is not None:
            self._fetched.setdefault(request_id, self._clock.monotonic())
            return state
        job = self._jobs.get(request_id)
        reason = self._reason(job) if job is not None else f"{state.operation} is about to end"
        return Pending(request_id=request_id, queue_state="active", reason=reason)

    def interrupted(self, request_ids: Collection[str]) -> None:
        """Sampling requests of earlier servers. They stay pending in the store, and so are known to later ones."""
        self._interrupted = frozenset(request_ids)

    def fetched_before(self, at: float) -> Sequence[str]:
        """Requests whose answers were fetched before this time of the clock, each returned once."""
        found = list(itertools.takewhile(lambda request_id: self._fetched[request_id] < at, self._fetched))
        for request_id in found:
            del self._fetched[request_id]
        return found

    async def poll_disconnected(self, principal: str, request_id: str) -> None:
        """The client's side closed the connection of a long poll for this request; that poll is over."""
        state = await self._future(principal, request_id)
        self._liveness.poll_disconnected(client_of(state.key))

    async def submission_disconnected(self, principal: str, request_id: str) -> None:
        """The client's side closed the connection on which it had sent this request, before the answer."""
        await self._future(principal, request_id)
        self._liveness.submission_disconnected(request_id)

    async def cancel_future(self, principal: str, request_id: str) -> None:
        """Ends a sampling request, whose future fails; others run on, for what they do counts. Raises ``NotFound``."""
        await self._future(principal, request_id)
        job = self._jobs.get(request_id)
        if job is not None and job.is_sample:
            self._jobs.fail(job, UserError("the request was cancelled by its client"))

    def abandon(self, request_ids: Collection[str], why: str) -> None:
        """Ends sampling requests whose client is not there any more."""
        found = (self._jobs.get(request_id) for request_id in request_ids)
        jobs = [job for job in found if job is not None and not job.ended]
        for job in jobs:
            self._abandoned[job.request_id] = None
            self._jobs.fail(job, ServerError(f"the request was abandoned: {why}"))
        while len(self._abandoned) > MAX_ABANDONED:
            del self._abandoned[next(iter(self._abandoned))]
        if jobs:
            log.info("%d sampling requests were abandoned: %s", len(jobs), why)

    async def _future(self, principal: str, request_id: str) -> FutureState:
        state = await self._store.get(request_id)
        if state.owner != principal:  # before any waiting, whose length would show that the id exists
            raise NotFound(f"no request {request_id!r}: it never was, or its answer is no longer kept")
        return state
