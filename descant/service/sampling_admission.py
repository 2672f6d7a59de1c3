"""Admission of sampling requests: how many wait and run, and whether there is room for more.

    admission = SamplingAdmission(base, most=SamplingLoad(requests=4096, sequences=65536, bytes=1 << 30))
    admission.admit(owner, load)    # raises ``Overloaded``
    admission.release(owner, load)  # it has ended

An owner that is alone may have all of it. When it is full, an owner with less than an even share (of those that hold
something) is let in all the same, and one that holds nothing always is; the others get HTTP 429. So one owner's flood
is in no other's way, and with n owners there is at most 1 + 1/2 + … + 1/n times as much as with one,
and a request of each.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from descant.errors import Overloaded
from descant.types import ModelInput, TensorData

REQUEST_BYTES = 4096
"""What any request takes of memory: its entries in our tables, its tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLoad:
    requests: int = 0
    sequences: int = 0
    bytes: int = 0

    def __add__(self, other: SamplingLoad) -> SamplingLoad:
        return SamplingLoad(
            requests=self.requests + other.requests,
            sequences=self.sequences + other.sequences,
            bytes=self.bytes + other.bytes,
        )

    def __sub__(self, other: SamplingLoad) -> SamplingLoad:
        return self + SamplingLoad(requests=-other.requests, sequences=-other.sequences, bytes=-other.bytes)


def load_of(prompt: ModelInput, num_samples: int, targets: TensorData | None) -> SamplingLoad:
    """Of one request."""
    num_bytes = REQUEST_BYTES + sum(chunk.tokens.nbytes for chunk in prompt)
    if targets is not None:
        cells = (targets.data, targets.sparse_crow_indices, targets.sparse_col_indices)
        num_bytes += sum(array.nbytes for array in cells if array is not None)
    return SamplingLoad(requests=1, sequences=num_samples, bytes=num_bytes)


class SamplingAdmission:
    """Of one base."""

    def __init__(self, base: str, *, most: SamplingLoad):
        self._base = base
        self._most = most
        self._of_owner: dict[str, SamplingLoad] = {}
        self.held = SamplingLoad()

    def admit(self, owner: str, load: SamplingLoad) -> None:
        """Raises ``Overloaded``, and holds nothing then."""
        own = self._of_owner.get(owner)
        if own is not None:
            for of_all, of_owner, most, what in zip(
                astuple(self.held + load),
                astuple(own + load),
                astuple(self._most),
                ("sampling requests", "sequences", "bytes of prompts"),
                strict=True,
            ):
                if of_all > most and of_owner > most // len(self._of_owner):
                    raise Overloaded(
                        f"{of_all} {what} would be in flight on {self._base}, {of_owner} of them yours, expected at "
                        f"most {most} and your even share of that; send it again when some of yours has ended"
                    )
        self._of_owner[owner] = load if own is None else own + load
        self.held += load

    def release(self, owner: str, load: SamplingLoad) -> None:
        """Once, however it ended."""
        self.held -= load
        left = self._of_owner[owner] - load
        if left.requests:
            self._of_owner[owner] = left
        else:
            del self._of_owner[owner]
