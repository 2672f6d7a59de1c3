"""Requests that were accepted and have not ended. Each one ends, with an answer or an error, and exactly once."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from descant.errors import ServerError
from descant.ports import Clock, FutureStore
from descant.service.presence import Client
from descant.types import Answer, Encoded

log = logging.getLogger(__name__)

RESOLVE_DELAYS_S = (0.0, 0.0, 1.0, 5.0, 30.0)
"""When the store does not take an answer it is offered again, after these times."""

CLOSE_TIMEOUT_S = 5.0

RATE_WINDOW = 32
"""Forward and backward passes by which the estimate of a base's speed goes."""


@dataclass(slots=True, eq=False)
class Job:
    """One accepted request. ``num_tokens``: what it puts through the base model, 0 if nothing to speak of. ``client``:
    who waits for it, if it is given up without.

    ``claimed``: somebody has come for its answer, and it is that client's from then on. ``claimed_at_once``: its client
    said that it comes as soon as it has the request's id, or closed the connection before; if it does not come, nobody
    will. ``unclaimed_since``: when it was sent last.
    ``submitted``: the backend has it; until then it waits for its turn in the order of its model.
    ``on_end`` is called once, however it ends.
    """

    request_id: str
    operation: str
    base: str
    model_id: str | None = None
    seq_id: int = 0
    num_tokens: int = 0
    client: Client | None = None
    claimed: bool = False
    claimed_at_once: bool = False
    accepted_at: float = 0.0
    unclaimed_since: float = 0.0
    on_end: Callable[[], None] | None = None
    submitted: bool = False
    ended: bool = False
    order: int = field(default_factory=itertools.count().__next__)
    task: asyncio.Task[None] | None = None


class Jobs:
    def __init__(self, *, futures: FutureStore, clock: Clock, encode: Callable[[Answer | Exception], Encoded]):
        self._futures = futures
        self._clock = clock
        self._encode = encode
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._passes: dict[str, deque[tuple[float, int]]] = {}
        self._last_end: dict[str, float] = {}

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, request_id: str) -> Job | None:
        return self._jobs.get(request_id)

    def where(self, wanted: Callable[[Job], bool]) -> list[Job]:
        return [job for job in self._jobs.values() if wanted(job)]

    def idle_s(self, base: str) -> float:
        """How long this base has had work and ended none of it; 0 without work."""
        submitted = [job.accepted_at for job in self._jobs.values() if job.base == base and job.submitted]
        if not submitted:
            return 0.0
        return self._clock.monotonic() - max(min(submitted), self._last_end.get(base, 0.0))

    def add(self, job: Job) -> Job:
        job.accepted_at = job.unclaimed_since = self._clock.monotonic()
        self._jobs[job.request_id] = job
        return job

    def start(self, job: Job, answer: Awaitable[Answer]) -> None:
        """Waits for ``answer`` in the background and ends the job with it, or with what it raises."""
        job.submitted = True
        job.task = self.spawn(self._finish(job, answer))
        if inspect.iscoroutine(answer):  # cancelled before it began, it would complain that it was never awaited
            job.task.add_done_callback(lambda _: answer.close())

    def fail(self, job: Job, error: Exception) -> None:
        """Ends the job with ``error``, whatever it is doing."""
        if job.ended:
            return
        job.ended = True
        if job.task is not None:
            job.task.cancel()
        job.task = self.spawn(self._end(job, error))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of our own: it outlives the request that asked for it, and ``close`` ends it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Stops everything. Answers are still written, for some seconds; what has not ended stays pending in the store,
        and fails at the next start."""
        writing = [job.task for job in self._jobs.values() if job.ended and job.task is not None]
        if writing:
            await asyncio.wait(writing, timeout=CLOSE_TIMEOUT_S)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def resolve(self, request_id: str, answer: Answer | Exception) -> None:
        """Ends a future in the store, whether or not it has a job."""
        try:
            encoded = self._encode(answer)
        except Exception:
            log.exception("the answer of request %s could not be encoded", request_id)
            answer = ServerError("the answer could not be encoded: an internal error")
            encoded = self._encode(answer)
        for delay_s in RESOLVE_DELAYS_S:
            if delay_s:
                await self._clock.sleep(delay_s)
            try:
                await self._futures.resolve(request_id, encoded, failed=isinstance(answer, Exception))
                return
            except Exception:
                log.exception("the store did not take the answer of request %s", request_id)
        log.error("the answer of request %s is lost; it stays pending until the next start", request_id)

    # ----------------------------------------------------------------------------------------------------------------

    def reason(self, job: Job) -> str:
        """What runs now and how much is ahead of this job that the backend has. Names nobody else's ids."""
        if job.model_id is None:
            others = sum(other.base == job.base and other.model_id is None for other in self._jobs.values()) - 1
            return f"{job.operation} runs on {job.base}, together with {others} other sampling requests"
        ahead = [
            other
            for other in self._jobs.values()
            if other.base == job.base and other.submitted and other.model_id is not None and other.order < job.order
        ]
        what = f"{job.operation} (seq_id {job.seq_id})"
        if not ahead:
            return f"{what} runs now on {job.base}{self._size(job.base, job.num_tokens)}"
        own = [other for other in ahead if other.model_id == job.model_id]
        first = f" (first {own[0].operation}, seq_id {own[0].seq_id})" if own else ""
        size = self._size(job.base, sum(other.num_tokens for other in ahead))
        return (
            f"{what} is queued on {job.base}: ahead of it are {len(own)} requests of this model{first} "
            f"and {len(ahead) - len(own)} of other models{size}"
        )

    def _size(self, base: str, num_tokens: int) -> str:
        if not num_tokens:
            return ""
        passes = self._passes.get(base, deque())
        seconds = passes[-1][0] - passes[0][0] if len(passes) > 2 else 0.0
        if seconds <= 0:
            return f", {num_tokens} tokens"
        # The first pass of the window began before it.
        rate = sum(tokens for _, tokens in itertools.islice(passes, 1, None)) / seconds
        return f", {num_tokens} tokens, about {num_tokens / rate:.0f} s" if rate > 0 else f", {num_tokens} tokens"

    async def _finish(self, job: Job, answer: Awaitable[Answer]) -> None:
        result: Answer | Exception
        try:
            result = await answer
        except Exception as error:
            result = error
        if job.ended:
            return
        job.ended = True
        self._last_end[job.base] = self._clock.monotonic()
        if job.num_tokens and job.model_id is not None and not isinstance(result, Exception):
            passes = self._passes.setdefault(job.base, deque(maxlen=RATE_WINDOW))
            passes.append((self._clock.monotonic(), job.num_tokens))
        await self._end(job, result)

    async def _end(self, job: Job, answer: Answer | Exception) -> None:
        if job.on_end is not None:
            job.on_end()
        try:
            await self.resolve(job.request_id, answer)
        finally:
            self._jobs.pop(job.request_id, None)
