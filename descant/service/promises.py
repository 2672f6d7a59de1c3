"""The protocol's futures as their clients see them: promised, waited for, cancelled, given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from descant.errors import Gone, NotFound, ServerError, UserError
from descant.ports import Clock, FutureStore
from descant.service.jobs import Job, Jobs
from descant.service.presence import Client, Presence, client_of
from descant.service.sessions import Sessions
from descant.types import FutureKey, FutureState

log = logging.getLogger(__name__)

MAX_GIVEN_UP = 1 << 16
"""Sampling requests given up of which it is remembered that they were."""

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


class Promises:
    """Owns which clients are there (``presence``), and which requests were given up because nobody waited. What a
    request does, and how it ends, is the affair of whoever had it accepted and of its ``Job``."""

    def __init__(
        self,
        *,
        futures: FutureStore,
        jobs: Jobs,
        sessions: Sessions,
        clock: Clock,
        vanish_grace_s: float,
        reason: Callable[[Job], str],
    ):
        """``reason`` says in a sentence why a job has not ended."""
        self._futures = futures
        self._jobs = jobs
        self._sessions = sessions
        self._clock = clock
        self._reason = reason
        self.presence = Presence(
            clock=clock,
            grace_s=vanish_grace_s,
            spawn=jobs.spawn,
            vanished=lambda client: self.give_up(
                client.session_id, "its client closed all its connections", client=client
            ),
        )
        self._given_up: dict[str, None] = {}
        """The latest sampling requests for which nobody waited any more."""

    async def accept(
        self,
        *,
        key: FutureKey,
        owner: str,
        base: str,
        operation: str,
        begin: Callable[[str], None],
        not_begun: Callable[[], None] | None = None,
    ) -> str:
        """The future of a submission. ``begin`` is called with its id if it is new, and only then: of the same request
        sent twice, one begins. Client gone or not, what was promised is begun."""

        self.presence.sign(client_of(key))

        async def promise() -> str:
            new = False
            try:
                request_id, new = await self._futures.put(key=key, owner=owner, base=base, operation=operation)
            finally:
                if not new and not_begun is not None:
                    not_begun()
            if new:
                begin(request_id)
            elif (job := self._jobs.get(request_id)) is not None:
                job.unclaimed_since = self._clock.monotonic()
            return request_id

        return await asyncio.shield(self._jobs.spawn(promise()))

    async def retrieve_future(self, principal: str, request_id: str, *, timeout_s: float) -> FutureState | Pending:
        """Waits up to ``timeout_s``. Raises ``NotFound`` for an id this principal does not own, ``Gone`` for a sampling
        request that was given up because nobody waited for it: who still wants it sends it again."""
        state = await self._future(principal, request_id)
        job = self._jobs.get(request_id)
        if job is not None:
            job.claimed = True
        client = client_of(state.key)
        with self.presence.polling(client):
            session = self._sessions.get(client.session_id)
            if session is not None:
                session.last_seen = self._clock.monotonic()
            if state.encoded is None and timeout_s > 0:
                state = await self._futures.get(request_id, timeout_s=timeout_s)
        if request_id in self._given_up:
            raise Gone(f"request {request_id!r} was given up, since nobody waited for it; send it again")
        if state.encoded is not None:
            return state
        job = self._jobs.get(request_id)
        reason = self._reason(job) if job is not None else f"{state.operation} is about to end"
        return Pending(request_id=request_id, queue_state="active", reason=reason)

    async def poll_broken_off(self, principal: str, request_id: str) -> None:
        """The client's side closed the connection on which it waited for this request; that wait is over."""
        state = await self._future(principal, request_id)
        self.presence.broken_off(client_of(state.key))

    async def submission_broken_off(self, principal: str, request_id: str) -> None:
        """The client's side closed the connection on which it had sent this request, before the answer: it has no id to
        wait for. It may send the request again, as the SDK does a second later where the line was cut, and come then;
        if it does not, a sampling request ends unclaimed. From a client that claims at once, and would be waiting if it
        had anything to wait for, it is as much a sign that it has vanished as a wait that was broken off."""
        await self._future(principal, request_id)
        job = self._jobs.get(request_id)
        if job is None or job.client is None:
            return
        if job.claimed_at_once:
            self.presence.broken_off(job.client)
        job.claimed_at_once = True

    async def cancel_future(self, principal: str, request_id: str) -> None:
        """Ends a sampling request, whose future fails; others run on, for what they do counts. Raises ``NotFound``."""
        await self._future(principal, request_id)
        job = self._jobs.get(request_id)
        if job is not None and job.client is not None:
            self._jobs.fail(job, UserError("the request was cancelled by its client"))

    def give_up(self, session_id: str, why: str, *, client: Client | None = None) -> None:
        """Ends a session's sampling requests, or those of one client of it, whose client is not there any more."""
        jobs = self._jobs.where(lambda job: job.client is not None and job.client.session_id == session_id)
        self._give_up([job for job in jobs if client in (None, job.client)], why)

    def give_up_unclaimed(self, timeout_s: float) -> None:
        """Ends the sampling requests whose clients come for them at once, and did not in this time."""
        latest = self._clock.monotonic() - timeout_s
        jobs = self._jobs.where(lambda job: job.claimed_at_once and not job.claimed and job.unclaimed_since < latest)
        self._give_up(jobs, f"nobody came for the answer within {timeout_s:g} s")

    def _give_up(self, jobs: Sequence[Job], why: str) -> None:
        jobs = [job for job in jobs if not job.ended]
        for job in jobs:
            self._given_up[job.request_id] = None
            self._jobs.fail(job, ServerError(f"the request was given up: {why}"))
        while len(self._given_up) > MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        if jobs:
            log.info("%d sampling requests were given up: %s", len(jobs), why)

    async def _future(self, principal: str, request_id: str) -> FutureState:
        state = await self._futures.get(request_id)
        if state.owner != principal:  # before any waiting, whose length would tell that the id exists
            raise NotFound(f"no request {request_id!r}: it never was, or its answer is no longer kept")
        return state
