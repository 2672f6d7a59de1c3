"""What a request wants to know of its prompt, collected chunk by chunk. numpy alone.

    SampleRequest → PromptScorer.chunk (one a step) → the sampler → PromptRows → PromptScorer.result

A row is a prompt token together with the distribution over the token that comes after it, so row t is about position
t + 1. All rows from the first that anything was asked of are computed; ``result`` leaves out what was not asked for.

Legend: N prompt tokens, S rows of a chunk, K alternatives, C cells (of any number a row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from descant.sample.rng import stream_seed
from descant.types import (
    EMPTY_TOPK,
    Float32,
    Int32,
    Int64,
    PromptAltTokens,
    PromptScores,
    SampleRequest,
    TensorData,
    TopK,
)

MAX_ALTERNATIVES = 1 << 16
"""Random numbers set apart for each row, so that what is sampled does not depend on how many are asked for."""

_ALTERNATIVES_STREAM = -1
"""Among a request's streams of random numbers; those of its samples are 0 and up."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptChunk:
    """What is wanted of a step's tokens from its token number ``skip`` on: S rows.

    ``targets`` int64 [S]: the prompt's next tokens. ``row_starts`` int64 [S + 1] and ``token_ids`` int64 [C]: other
    tokens asked about (-1: none); None where there are none at all. ``num_alternatives`` tokens a row are sampled from
    the stream ``seed`` at ``temperature``, row r from offset ``(first_row + r) · MAX_ALTERNATIVES`` on.
    """

    skip: int
    first_row: int
    targets: Int64
    topk: int
    row_starts: Int64 | None
    token_ids: Int64 | None
    num_alternatives: int
    temperature: float
    seed: int

    @property
    def num_rows(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptRows:
    """A chunk's answers: ``logprobs`` [S] of its ``targets``; ``topk_ids`` and ``topk_logprobs`` [S, ≤ K], falling;
    ``cells`` [C], anything where -1 was asked; ``alternative_ids`` and ``alternative_logprobs`` [S,
    num_alternatives]."""

    logprobs: Float32
    topk_ids: Int32 | None = None
    topk_logprobs: Float32 | None = None
    cells: Float32 | None = None
    alternative_ids: Int64 | None = None
    alternative_logprobs: Float32 | None = None

    @staticmethod
    def joined(parts: Sequence[PromptRows]) -> PromptRows:
        """Parts of one chunk, in order."""
        if len(parts) == 1:
            return parts[0]
        names = [item.name for item in fields(PromptRows) if getattr(parts[0], item.name) is not None]
        return PromptRows(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


class PromptScorer:
    """One request's. ``first_position``: tokens before row ``first_position - 1`` may come from anywhere (shared
    pages); from there on they must be computed, in order."""

    def __init__(self, request: SampleRequest, prompt: Sequence[int], seed: int):
        """``seed``: the request's, resolved. Make one only where ``asked_for``."""
        self._request = request
        self._prompt = np.array(prompt, np.int64)
        self._seed = stream_seed(seed, _ALTERNATIVES_STREAM)
        self._rows: list[PromptRows] = []
        self._num_rows = 0
        self._own_first = 1  # of the prompt's own tokens and their alternatives
        if request.prompt_logprobs_last_n is not None:
            self._own_first = len(prompt) - request.prompt_logprobs_last_n
        firsts = []
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            firsts.append(self._own_first)
        if request.target_prompt_logprobs is not None:
            named = int(np.flatnonzero(request.target_prompt_logprobs.data >= 0)[0])
            starts = request.target_prompt_logprobs.row_starts()
            firsts.append(int(np.searchsorted(starts, named, side="right")))
        if request.prompt_alt_tokens_k:
            firsts.append(1)
        self.first_position = min(firsts)

    @staticmethod
    def asked_for(request: SampleRequest) -> bool:
        return (
            request.prompt_logprobs
            or request.topk_prompt_logprobs > 0
            or request.target_prompt_logprobs is not None
            or request.prompt_alt_tokens_k > 0
        )

    @property
    def done(self) -> bool:
        return self._num_rows == len(self._prompt) - self.first_position

    def reset(self) -> None:
        """What was collected is lost, with the sequence that computed it."""
        self._rows, self._num_rows = [], 0

    def chunk(self, start: int, end: int) -> PromptChunk | None:
        """For a step over tokens ``start:end`` of the sequence; None if none of them is asked about."""
        request = self._request
        first, last = max(start, self.first_position - 1), min(end, len(self._prompt) - 1)
        if first >= last:
            return None
        row_starts = token_ids = None
        if (wanted := request.target_prompt_logprobs) is not None:
            starts = wanted.row_starts()[first : last + 1]
            row_starts, token_ids = starts - starts[0], wanted.data[starts[0] : starts[-1]].astype(np.int64)
        return PromptChunk(
            skip=first - start,
            first_row=first,
            targets=self._prompt[first + 1 : last + 1],
            topk=request.topk_prompt_logprobs,
            row_starts=row_starts,
            token_ids=token_ids,
            num_alternatives=request.prompt_alt_tokens_k,
            temperature=request.sampling_params.temperature,
            seed=self._seed,
        )

    def take(self, rows: PromptRows) -> None:
        """The next chunk's."""
        self._rows.append(rows)
        self._num_rows += len(rows.logprobs)

    def result(self) -> PromptScores:
        """Once ``done``."""
        request = self._request
        logprobs = topk = targets = alternatives = None
        if request.prompt_logprobs:
            logprobs = np.full(len(self._prompt), np.nan, np.float32)
            for position, part in self._positions():
                logprobs[position : position + len(part.logprobs)] = part.logprobs
            logprobs[: self._own_first] = np.nan
        if request.topk_prompt_logprobs:
            topk = empty_topk(len(self._prompt), request.topk_prompt_logprobs)
            for position, part in self._positions():
                fill_topk(topk, position, part.topk_ids, part.topk_logprobs)
            topk.token_ids[: self._own_first], topk.logprobs[: self._own_first] = EMPTY_TOPK
        if (wanted := request.target_prompt_logprobs) is not None:
            cells = np.zeros(len(wanted.data), np.float32)
            place = int(wanted.row_starts()[self.first_position - 1])
            for part in self._rows:
                if part.cells is not None:
                    cells[place : place + len(part.cells)] = part.cells
                    place += len(part.cells)
            cells[wanted.data < 0] = 0.0
            targets = TensorData(
                data=cells,
                shape=wanted.shape,
                sparse_crow_indices=wanted.sparse_crow_indices,
                sparse_col_indices=wanted.sparse_col_indices,
            )
        if k := request.prompt_alt_tokens_k:
            ids = [
                np.zeros((0, k), np.int64),
                *(part.alternative_ids for part in self._rows if part.alternative_ids is not None),
            ]
            found = [part.alternative_logprobs for part in self._rows if part.alternative_logprobs is not None]
            alternatives = PromptAltTokens(
                tokens=np.concatenate(ids), logprobs=np.concatenate([np.zeros((0, k), np.float32), *found])
            )
        return PromptScores(logprobs=logprobs, topk=topk, target_logprobs=targets, alt_tokens=alternatives)

    def _positions(self) -> list[tuple[int, PromptRows]]:
        position, places = self.first_position, []
        for part in self._rows:
            places.append((position, part))
            position += len(part.logprobs)
        return places


def empty_topk(num_rows: int, k: int) -> TopK:
    return TopK(
        token_ids=np.full((num_rows, k), EMPTY_TOPK[0], np.int32),
        logprobs=np.full((num_rows, k), EMPTY_TOPK[1], np.float32),
    )


def fill_topk(topk: TopK, row: int, ids: Int32 | None, logprobs: Float32 | None) -> None:
    """Rows ``row`` and up; a vocabulary smaller than k leaves cells empty."""
    if ids is not None and logprobs is not None:
        topk.token_ids[row : row + len(ids), : ids.shape[1]] = ids
        topk.logprobs[row : row + len(logprobs), : logprobs.shape[1]] = logprobs
