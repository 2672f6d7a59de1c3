"""Which engine a request runs on: where its beginning was computed, as far as that is worth it, else the idlest.

``copy_target`` and ``Prefixes`` are pure; ``Router`` adds what is in flight.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence

from descant.pools.members import EngineMember
from descant.pools.traffic import Traffic
from descant.prefix import PAGE_TOKENS, is_worth_it, page_keys
from descant.types import SampleRequest, input_tokens


def copy_target(in_flight: Mapping[int, int], holders: Collection[int], *, full: int) -> int | None:
    """The replica that a hot version should be copied to, or None.

    ``in_flight``: sequences being sampled on each live replica. ``holders``: where the version is already. It is hot
    when each of those has at least ``full``, and a replica with less than half of that is idle enough to help.
    """
    here = [in_flight[replica] for replica in holders if replica in in_flight]
    others = [replica for replica in in_flight if replica not in holders]
    if not here or not others or min(here) < full:
        return None
    idlest = min(others, key=lambda replica: (in_flight[replica], replica))
    return idlest if 2 * in_flight[idlest] < full else None


class Prefixes:
    """On which replica the beginnings of recent prompts were computed last. Prompts are named by the keys of their
    pages, in order, each of which stands for all before it (``descant.prefix``); the least recently used go first."""

    def __init__(self, most: int = 1 << 16):
        self._most = most
        self._replicas: OrderedDict[bytes, int] = OrderedDict()

    def find(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """(the replica that has most of it, how many pages); (0, 0) where none has any."""
        for index in range(len(keys), 0, -1):
            replica = self._replicas.get(keys[index - 1])
            if replica is not None:
                return replica, index
        return 0, 0

    def note(self, keys: Sequence[bytes], replica: int) -> None:
        for key in keys:
            self._replicas[key] = replica
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)


class Router:
    """Over the members of a pool, which it does not change."""

    def __init__(self, members: Mapping[int, EngineMember], traffic: Traffic):
        self._members = members
        self._traffic = traffic
        self._prefixes = Prefixes()
        self._in_flight: Counter[int] = Counter()

    def begin(self, replica: int, num_sequences: int) -> None:
        self._in_flight[replica] += num_sequences

    def end(self, replica: int, num_sequences: int) -> None:
        self._in_flight[replica] -= num_sequences

    @property
    def in_flight(self) -> Mapping[int, int]:
        """Sequences being sampled, on each replica that serves."""
        return {replica: self._in_flight[replica] for replica, m in self._members.items() if m.serving}

    def idlest(self, among: Collection[int]) -> int:
        """With the fewest sequences in flight, of those that serve, if any does."""
        return min(
            among,
            key=lambda i: (not self._members[i].serving, self._in_flight[i], self._traffic.of_replica(i), i),
        )

    def choose(self, request: SampleRequest, among: Collection[int], *, max_num_seqs: int) -> int:
        """Of those that hold the request's version."""
        idlest = self.idlest(among)
        if len(self._members) == 1:
            return idlest
        chosen = idlest
        keys = list(page_keys(request.version, request.prefix_scope, input_tokens(request.prompt)))
        kept_on, num_pages = self._prefixes.find(keys)
        if (
            num_pages > 0
            and kept_on in among
            and self._members[kept_on].serving
            and is_worth_it(
                num_pages * PAGE_TOKENS,
                self._in_flight[kept_on],
                self._in_flight[idlest],
                max_num_seqs=max_num_seqs,
            )
        ):
            chosen = kept_on
        self._prefixes.note(keys, chosen)
        return chosen
