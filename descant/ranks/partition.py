"""Partitions requests into pieces, and pieces among passes and ranks.

On a CPU results are batch-invariant: bits do not depend on the other requests of a turn. A library picks its kernels,
its threads' parts and so the order of its sums by the number of rows, forward and backward, in float32 and in bfloat16.
So the pieces of a request are a function of it and the settings alone (``cut_into_pieces``), and each piece is a pass;
turns carry whole pieces, of as many requests as fit. On a GPU each datum is a piece, and a pass carries whatever fits
(``balanced_shares``).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from descant.train.runner import Part, RequestKey

MAX_SHARING = 8
"""A pass takes datums of at most so many times its budget, however much of them is shared: attention still reads all of
it for each of them, and each token of each has a loss of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingDatum:
    """``shared``: the tokens that it begins with as the datum before it does, which are computed once in a pass of
    both (0 unless they share). ``joins``: it is in the same piece as the datum before it. ``rank``: the one that
    computes its piece, where pieces are cut."""

    part: Part
    tokens: int
    shared: int = 0
    joins: bool = False
    rank: int = 0

    @property
    def added_tokens(self) -> int:
        """What it adds to a pass that has the datum before it."""
        return max(self.tokens - self.shared, self.tokens // MAX_SHARING)


def piece_at(data: Sequence[WaitingDatum], start: int) -> Sequence[WaitingDatum]:
    end = start + 1
    while end < len(data) and data[end].joins:
        end += 1
    return data[start:end]


def computed_tokens(data: Sequence[WaitingDatum]) -> int:
    """What a pass of these computes."""
    models: set[str] = set()
    tokens = 0
    for datum in data:
        model_id = datum.part.request[0]
        tokens += datum.added_tokens if model_id in models else datum.tokens
        models.add(model_id)
    return tokens


def cut_into_pieces(data: Sequence[WaitingDatum], num_ranks: int, *, piece_tokens: int) -> tuple[WaitingDatum, ...]:
    """A request's datums in the order in which they run, cut into pieces: a function of these alone.

    A piece is what one pass computes: ``piece_tokens`` at most (a datum larger than that is one by itself), and datums
    that share a prefix stay in one piece where they fit one. Of several ranks each has its part of the request,
    even in tokens. The first part is that of another rank for another model, so that small requests do not all meet
    on one."""
    parts = [list(range(len(data)))] if num_ranks == 1 else _balanced(data, num_ranks)
    first = zlib.crc32(data[0].part.request[0].encode()) if data else 0
    pieces = [
        [replace(datum, rank=(first + number) % num_ranks) for datum in piece]
        for number, indices in enumerate(parts)
        for piece in _pieces([data[index] for index in indices], piece_tokens)
    ]
    pieces.sort(key=lambda piece: piece[0].part.datum)
    return tuple(
        replace(datum, joins=index > 0, shared=datum.shared if index and _follows(piece[index - 1], datum) else 0)
        for piece in pieces
        for index, datum in enumerate(piece)
    )


def _pieces(data: Sequence[WaitingDatum], piece_tokens: int) -> list[list[WaitingDatum]]:
    pieces: list[list[WaitingDatum]] = []
    room = 0
    for chain in _chains(data):
        whole = chain[0].tokens + sum(datum.added_tokens for datum in chain[1:])
        for index, datum in enumerate(chain):
            cost = datum.added_tokens if index else datum.tokens
            if not pieces or (cost if index else whole) > room:
                pieces.append([])
                cost, room = datum.tokens, piece_tokens
            pieces[-1].append(datum)
            room -= cost
    return pieces


def _chains(data: Sequence[WaitingDatum]) -> list[list[WaitingDatum]]:
    """One request's datums, in runs that share a prefix."""
    chains: list[list[WaitingDatum]] = []
    for datum in data:
        if chains and _follows(chains[-1][-1], datum):
            chains[-1].append(datum)
        else:
            chains.append([datum])
    return chains


def piece_shares(data: Sequence[WaitingDatum], num_ranks: int) -> tuple[tuple[tuple[Part, ...], ...], ...]:
    """``Microbatch.shares`` of datums that are cut into pieces: each piece is a pass of its rank."""
    passes: list[list[tuple[Part, ...]]] = [[] for _ in range(num_ranks)]
    at = 0
    while at < len(data):
        piece = piece_at(data, at)
        passes[piece[0].rank].append(tuple(datum.part for datum in piece))
        at += len(piece)
    return _padded(passes)


def balanced_shares(
    data: Sequence[WaitingDatum], num_ranks: int, *, pass_tokens: int
) -> tuple[tuple[tuple[Part, ...], ...], ...]:
    """``Microbatch.shares`` of any datums: each datum on one rank, ranks even in tokens, as many passes for each.

    Datums that share a prefix stay together, unless together they are much more than one rank's even share and than the
    prefix: then that is computed once more on the next rank. A rank's passes have ``pass_tokens`` at most (a datum
    larger than that has one of its own); alone, a rank has one pass, whatever is in it."""
    if num_ranks == 1:
        return ((tuple(datum.part for datum in data),),)
    return _padded([_passes([data[index] for index in own], pass_tokens) for own in _balanced(data, num_ranks)])


def _padded(passes: Sequence[Sequence[tuple[Part, ...]]]) -> tuple[tuple[tuple[Part, ...], ...], ...]:
    """As many passes for each rank: empty ones behind those of ranks that have fewer."""
    most = max(map(len, passes))
    return tuple((*own, *((),) * (most - len(own))) for own in passes)


def _balanced(data: Sequence[WaitingDatum], num_ranks: int) -> list[list[int]]:
    """The indices of each rank's datums, rising."""
    loads = [0] * num_ranks
    taken: list[list[int]] = [[] for _ in range(num_ranks)]
    for cost, indices in sorted(_prefix_groups(data, num_ranks), key=lambda group: (-group[0], group[1][0])):
        rank = loads.index(min(loads))
        loads[rank] += cost
        taken[rank] += indices
    return [sorted(indices) for indices in taken]


def _costs(data: Sequence[WaitingDatum]) -> list[int]:
    """Of each datum in a pass of all of them."""
    last: dict[RequestKey, WaitingDatum] = {}
    costs = []
    for datum in data:
        before = last.get(datum.part.request)
        costs.append(datum.added_tokens if before is not None and _follows(before, datum) else datum.tokens)
        last[datum.part.request] = datum
    return costs


def _follows(before: WaitingDatum, datum: WaitingDatum) -> bool:
    return datum.shared > 0 and (before.part.request, before.part.datum + 1) == (datum.part.request, datum.part.datum)


def _prefix_groups(data: Sequence[WaitingDatum], num_ranks: int) -> list[tuple[int, list[int]]]:
    """(tokens, indices) of datums that stay together."""
    chains: list[list[int]] = []
    last: dict[RequestKey, list[int]] = {}
    for index, datum in enumerate(data):
        chain = last.get(datum.part.request)
        if chain is None or not _follows(data[chain[-1]], datum):
            chain = []
            chains.append(chain)
        chain.append(index)
        last[datum.part.request] = chain
    even_share = sum(_costs(data)) / num_ranks
    return [piece for chain in chains for piece in _split_chain(data, chain, even_share)]


def _split_chain(data: Sequence[WaitingDatum], chain: Sequence[int], even_share: float) -> list[tuple[int, list[int]]]:
    first, *rest = (data[index] for index in chain)
    total = first.tokens + sum(datum.added_tokens for datum in rest)
    num_pieces = 1 if total <= max(1.25 * even_share, 2 * first.tokens) else math.ceil(total / even_share)
    pieces: list[tuple[int, list[int]]] = []
    done, number = 0, -1
    for index in chain:
        datum = data[index]
        if (piece := int(num_pieces * done / total)) > number:
            number = piece
            pieces.append((datum.tokens, [index]))
        else:
            tokens, indices = pieces[-1]
            pieces[-1] = (tokens + datum.added_tokens, [*indices, index])
        done += datum.added_tokens if index != chain[0] else datum.tokens
    return pieces


def _passes(data: Sequence[WaitingDatum], pass_tokens: int) -> tuple[tuple[Part, ...], ...]:
    passes: list[list[Part]] = [[]]
    room = pass_tokens
    for datum, cost in zip(data, _costs(data), strict=True):
        if passes[-1] and cost > room:
            passes.append([])
            cost, room = datum.tokens, pass_tokens
        passes[-1].append(datum.part)
        room -= cost
    return tuple(map(tuple, passes))
