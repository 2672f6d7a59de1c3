"""Agreement on an operation's outcome, so that it ends alike on all ranks. With one rank nothing is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from descant.distributed.failure import DistributedFailure
from descant.errors import DescantError
from descant.ranks.executor import to_descant_error
from descant.ranks.peers import Peers

R = TypeVar("R")


def gather_outcomes(peers: Peers, what: str, do: Callable[[], R]) -> list[R | DescantError]:
    """The outcomes of every rank's ``do``, a result or an error, by rank."""
    mine: R | DescantError
    try:
        mine = do()
    except Exception as error:
        if peers.sharded:  # the others are still in the pass that it left
            raise
        mine = to_descant_error(error)
    return peers.gather(what, mine)


def all_or_none(peers: Peers, do: Callable[[], None], undo: Callable[[], None]) -> None:
    """Raises the first rank's error on all ranks, where any has one; those that succeeded have undone it then."""
    said = gather_outcomes(peers, "outcome", do)
    first = next((error for error in said if error is not None), None)
    if first is None:
        return
    if said[peers.rank] is None:
        with suppress(DescantError):
            undo()
    raise first


def require_agreement(peers: Peers, what: Sequence[str], mine: Sequence[DescantError | None]) -> None:
    """For what cannot be undone: ends the replica where one rank failed and another did not."""
    for name, said in zip(what, zip(*peers.gather("outcomes", list(mine)), strict=True), strict=True):
        failed = [rank for rank, error in enumerate(said) if error is not None]
        if failed and len(failed) < len(said):
            cause = f"{name} failed there alone: {said[failed[0]]}"
            raise DistributedFailure(failed_ranks=failed, where=name, cause=cause)
