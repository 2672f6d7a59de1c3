"""What a pool needs of its members: a port, and whether it can be asked at this moment.

Members are numbered by replica. A replica that trains and samples is a member of both pools under one number, and that
is how an engine knows that it shares rows with a trainer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Protocol

from descant.errors import RankDied
from descant.ports import Engine, Measured, Progress, Trainer


class Availability(Protocol):
    @property
    def alive(self) -> bool: ...

    @property
    def serving(self) -> bool:
        """Alive, and past its start."""
        ...


class TrainerMember(Trainer, Availability, Protocol):
    """``Progress`` and ``Measured`` are used where it has them."""


class EngineMember(Engine, Availability, Protocol):
    """``Progress`` and ``Measured`` are used where it has them."""


async def stats_of(members: Collection[object]) -> Mapping[str, float]:
    """The sum over those that are ``Measured``, and how many they all are."""
    measured = [member for member in members if isinstance(member, Measured)]
    total: Counter[str] = Counter()
    for outcome in await asyncio.gather(*(member.stats() for member in measured), return_exceptions=True):
        if isinstance(outcome, BaseException):
            if not isinstance(outcome, RankDied):
                raise outcome
        else:
            total.update(outcome)
    return {**total, "replicas_serving": len(members)}


def running_of(members: Mapping[int, object]) -> str:
    """What those that are ``Progress`` do; where there are several, by replica."""
    texts = {replica: member.running() for replica, member in members.items() if isinstance(member, Progress)}
    if len(members) == 1:
        return next(iter(texts.values()), "")
    return "; ".join(f"{text} (replica {replica})" for replica, text in texts.items() if text)
