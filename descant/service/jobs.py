"""Requests that were accepted and have not ended. Each one ends, with an answer or an error, and exactly once."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from descant.errors import ServerError
from descant.ports import Clock, FutureStore
from descant.types import Answer, Encoded, ForwardBackwardOutput

log = logging.getLogger(__name__)

RESOLVE_DELAYS_S = (0.0, 0.0, 1.0, 5.0, 30.0)
"""When the store does not take an answer it is offered again, after these times."""

CLOSE_TIMEOUT_S = 5.0

RATE_WINDOW = 32
"""Forward and backward passes by which the estimate of a base's speed goes."""

MOST_AHEAD = 1000
"""Requests ahead of one that are counted when its client asks: who queues many asks for each of them."""


@dataclass(slots=True, eq=False)
class Job:
    """One accepted request. ``num_tokens``: what it puts through the base model, 0 if nothing to speak of.

    ``submitted_at``: when the backend got it; until then it waits for its turn in the order of its model.
    ``on_submit`` is called at that time, ``on_end`` once, however it ends, and ``on_stored`` when its answer is
    written down.
    """

    request_id: str
    operation: str
    base: str
    owner: str
    model_id: str | None = None
    seq_id: int = 0
    num_tokens: int = 0
    accepted_at: float = 0.0
    on_submit: Callable[[], None] | None = None
    on_end: Callable[[], None] | None = None
    on_stored: Callable[[], object] | None = None
    submitted_at: float | None = None
    ended: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def is_sample(self) -> bool:
        """Else it belongs to a model: it trains, saves, loads, or makes it."""
        return self.model_id is None


class _Index:
    """Jobs by a key, each key's in the order in which they were added."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, dict[str, Job]] = {}

    def add(self, key: Hashable, job: Job) -> None:
        self._jobs.setdefault(key, {})[job.request_id] = job

    def discard(self, key: Hashable, job: Job) -> None:
        jobs = self._jobs.get(key)
        if jobs is not None and jobs.pop(job.request_id, None) is not None and not jobs:
            del self._jobs[key]

    def __getitem__(self, key: Hashable) -> Collection[Job]:
        jobs = self._jobs.get(key)
        return () if jobs is None else jobs.values()


class Jobs:
    """What is asked of them often (what a base or a model has) costs what is found, not
    what there is."""

    def __init__(self, *, futures: FutureStore, clock: Clock, encode: Callable[[Answer | Exception], Encoded]):
        self._futures = futures
        self._clock = clock
        self._encode = encode
        self._jobs: dict[str, Job] = {}
        self._training, self._sampling = _Index(), _Index()
        """By base."""
        self._submitted = _Index()
        """Training requests that backends have, by base."""
        self._at_work = _Index()
        """All that backends have, by base."""
        self._of_model = _Index()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._passes: dict[str, deque[tuple[float, int]]] = {}
        self._last_end: dict[str, float] = {}

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, request_id: str) -> Job | None:
        return self._jobs.get(request_id)

    def of_base(self, base: str) -> list[Job]:
        return [*self._training[base], *self._sampling[base]]

    def num_of_base(self, base: str) -> int:
        return len(self._training[base]) + len(self._sampling[base])

    def of_model(self, model_id: str) -> list[Job]:
        return list(self._of_model[model_id])

    def idle_s(self, base: str) -> float:
        """How long this base has had work and ended none of it; 0 without work."""
        longest = next(iter(self._at_work[base]), None)
        if longest is None or longest.submitted_at is None:
            return 0.0
        return self._clock.monotonic() - max(longest.submitted_at, self._last_end.get(base, 0.0))

    def add(self, job: Job) -> Job:
        job.accepted_at = self._clock.monotonic()
        self._jobs[job.request_id] = job
        (self._sampling if job.is_sample else self._training).add(job.base, job)
        if job.model_id is not None:
            self._of_model.add(job.model_id, job)
        return job

    def start(self, job: Job, answer: Awaitable[Answer]) -> None:
        """Waits for ``answer`` in the background and ends the job with it, or with what it raises."""
        job.submitted_at = self._clock.monotonic()
        self._at_work.add(job.base, job)
        if job.model_id is not None:
            self._submitted.add(job.base, job)
        if job.on_submit is not None:
            job.on_submit()
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
        and goes on at the next start."""
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
                await self._futures.resolve(
                    request_id, encoded, failed=isinstance(answer, Exception), loss=_loss_of(answer)
                )
                return
            except Exception:
                log.exception("the store did not take the answer of request %s", request_id)
        log.error("the answer of request %s is lost; it stays pending until the next start", request_id)

    # ----------------------------------------------------------------------------------------------------------------

    def reason(self, job: Job) -> str:
        """What runs now and how much is ahead of this job that the backend has. Names no other owner's ids."""
        if job.is_sample:
            others = len(self._sampling[job.base]) - 1
            return f"{job.operation} runs on {job.base}, together with {others} other sampling requests"
        what = f"{job.operation} (seq_id {job.seq_id})"
        ahead: list[Job] = []
        for other in self._submitted[job.base]:
            if other is job:
                break
            if len(ahead) == MOST_AHEAD:
                return f"{what} is queued on {job.base}: more than {MOST_AHEAD} requests are ahead of it"
            ahead.append(other)
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
            self._forget(job)
            if job.on_stored is not None:
                job.on_stored()

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.request_id, None)
        (self._sampling if job.is_sample else self._training).discard(job.base, job)
        for index in (self._submitted, self._at_work):
            index.discard(job.base, job)
        if job.model_id is not None:
            self._of_model.discard(job.model_id, job)


def _loss_of(answer: Answer | Exception) -> float | None:
    return answer.metrics.get("loss:sum") if isinstance(answer, ForwardBackwardOutput) else None
