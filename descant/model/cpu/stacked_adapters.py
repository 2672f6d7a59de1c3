"""Stacked adapters, for decode steps on CPU: weights of many side by side, one product for A and one for B.

    h [N, C] = x Aᵀ of all adapters at once;  a row's columns of other adapters are set to 0;  h Bᵀ

A product of a few rows costs the reading of its weights and a call of the library (some 10 µs), so each row may as well
be multiplied by every A. 32 sequences of 8 adapters of ranks 4 to 32 (128 columns; SmolLM2, one thread): a step takes
49 ms without adapters, 106 with a stack of each and 187 with the segments' own products; with one stack of all it takes
1.3 times as long as without.

**Columns are given to adapters as they come**, of whatever rank: its numbers are copied there (6 ms), and the others
stay as they are. With eight clients some adapter is new every few steps. Only once a stack has been the same for
``STEPS_BEFORE_PREPACKING`` steps is it prepacked: it takes a quarter less time then, but to prepack it takes as long as
some eight steps gain.

One adapter's numbers reach no other: the intermediates of other adapters are overwritten, not multiplied by 0, and as
the second product does multiply those zeros with every B, only adapters whose weights are finite are in a stack. The
bits are those of the segments' own products (tried for each width of a stack when it is first used). What is in no
stack, the segments' products do.

Legend: N rows, I in, O out, R rank bucket, C columns of a stack, S sites that share an input.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import RANK_BUCKETS
from descant.adapters.slots import RowRef
from descant.model.cpu import prepacked
from descant.model.forward_batch import MIN_ROWS, ForwardBatch, Segment
from descant.model.lora.batch import LoraBatch
from descant.model.lora.products import lora_add
from descant.types import SCALE_NUMERATOR

logger = logging.getLogger(__name__)

WIDTHS = (16, 32, 64, 96, 128, 192, 256)
"""Columns that a stack may have. More are more arithmetic for every row than reading the weights takes."""

STEPS_BEFORE_PREPACKING = 8

WASTEFUL_STEPS = 16
"""Steps running, of whose columns most are of adapters that are not in them, before the stacks are made anew."""

TRIED_ROWS = 61

KEPT_STEPS = 4
"""An adapter that has been in none of so many steps leaves its columns to others."""

MAX_BYTES = 1 << 30
"""Of all stacks together."""

Sites = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Linear layers of one input. ``outputs``: the sites of each output tensor (all sites, in order, once); ``widths``
    of the sites."""

    in_features: int
    outputs: tuple[Sites, ...]
    widths: tuple[int, ...]

    @property
    def sites(self) -> Sites:
        return tuple(site for sites in self.outputs for site in sites)

    def num_weights(self, num_columns: int) -> int:
        """Of a stack of so many columns, zeros included."""
        outputs = sum(len(sites) * sum(width for _, width in self._of(sites)) for sites in self.outputs)
        return num_columns * (len(self.sites) * self.in_features + outputs)

    def _of(self, sites: Sites) -> list[tuple[int, int]]:
        return [pair for pair in zip(self.sites, self.widths) if pair[0] in sites]

    def by_output(self) -> Iterator[tuple[Sites, list[slice]]]:
        """The sites of each output, and their columns of all."""
        ends = list(accumulate(self.widths))
        columns = iter([slice(end - width, end) for end, width in zip(ends, self.widths)])
        for sites in self.outputs:
            yield sites, [next(columns) for _ in sites]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Of one product: ``a`` [S · C, I], scales in it; ``b`` of each output [O, its sites · C]."""

    a: torch.Tensor
    b: tuple[torch.Tensor, ...]

    @staticmethod
    def zeros(product: Product, num_columns: int, dtype: torch.dtype) -> _Weights:
        widths = dict(zip(product.sites, product.widths))
        return _Weights(
            a=torch.zeros(len(product.sites) * num_columns, product.in_features, dtype=dtype),
            b=tuple(
                torch.zeros(sum(widths[site] for site in sites), len(sites) * num_columns, dtype=dtype)
                for sites in product.outputs
            ),
        )

    def parts(self, product: Product, num_columns: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Of each site A [C, I] and B [O, C], views."""
        number = 0
        for b, (sites, outputs) in zip(self.b, product.by_output()):
            first = outputs[0].start
            for index, (site, own) in enumerate(zip(sites, outputs)):
                columns = slice(index * num_columns, (index + 1) * num_columns)
                yield (
                    site,
                    self.a[number * num_columns :][:num_columns],
                    b[own.start - first : own.stop - first, columns],
                )
                number += 1

    def prepacked(self) -> _Weights:
        return _Weights(a=prepacked.reorder(self.a), b=tuple(prepacked.reorder(b_OC) for b_OC in self.b))


@dataclass(slots=True, eq=False, kw_only=True)
class _Stack:
    """``columns`` of adapters, none of which overlap; ``weights`` by a product's sites, where one of them changes it.
    ``prepacked``: the same once more. ``steps``: in how many it served since it last changed."""

    num_columns: int
    columns: dict[RowRef, slice] = field(default_factory=dict)
    weights: dict[Sites, _Weights] = field(default_factory=dict)
    prepacked: dict[Sites, _Weights] | None = None
    steps: int = 0

    def gap(self, width: int, kept: Collection[RowRef], num_columns: int | None = None) -> slice | None:
        """Columns for one more, of nobody in ``kept``; ``num_columns``: if there were so many."""
        taken = [columns for row, columns in self.columns.items() if row in kept]
        for start in range(0, (num_columns or self.num_columns) - width + 1, width):
            if not any(columns.start < start + width and start < columns.stop for columns in taken):
                return slice(start, start + width)
        return None

    def widened(self, products: Sequence[Product], num_columns: int) -> _Stack:
        """Another with the same adapters in the same columns."""
        wide = _Stack(num_columns=num_columns, columns=dict(self.columns))
        for product in products:
            if (weights := self.weights.get(product.sites)) is None:
                continue
            own = wide.weights[product.sites] = _Weights.zeros(product, num_columns, weights.a.dtype)
            for (_, a_CI, b_OC), (_, from_CI, from_OC) in zip(
                own.parts(product, num_columns), weights.parts(product, self.num_columns), strict=True
            ):
                a_CI[: self.num_columns] = from_CI
                b_OC[:, : self.num_columns] = from_OC
        return wide

    def addition(self, x_NI: torch.Tensor, product: Product, others_NC: torch.Tensor) -> torch.Tensor | None:
        """[N, O]. ``others_NC``: what is not a row's own, bool [N, S · C]. None: no adapter changes this product."""
        weights = (self.weights if self.prepacked is None else self.prepacked).get(product.sites)
        if weights is None:
            return None
        h_NC = prepacked.linear(x_NI, weights.a, None).masked_fill_(others_NC, 0)
        columns = h_NC.split([len(sites) * self.num_columns for sites in product.outputs], dim=1)
        outputs = [prepacked.linear(own_NC, b, None) for own_NC, b in zip(columns, weights.b, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class _Slice:
    """Rows of a step by one stack. ``rows`` int64 [M], at least 8 (repeated to be so many); None: all, in order."""

    def __init__(self, stack: _Stack, rows: torch.Tensor | None, columns: Sequence[slice | None]):
        """``columns`` of the rows' adapters in the stack; None: of none in it."""
        self.stack, self.rows = stack, rows
        bounds = np.array([(0, 0) if own is None else (own.start, own.stop) for own in columns])
        numbers = np.arange(stack.num_columns)
        self._others_NC = torch.from_numpy((numbers < bounds[:, :1]) | (numbers >= bounds[:, 1:]))
        self._others = {1: self._others_NC}

    def others(self, num_sites: int) -> torch.Tensor:
        """bool [M, S · C]: columns of a row that are not its own adapter's."""
        if num_sites not in self._others:
            self._others[num_sites] = self._others_NC.repeat(1, num_sites)
        return self._others[num_sites]

    def addition(self, x_NI: torch.Tensor, product: Product) -> torch.Tensor | None:
        """[M, O]; 0 at rows of no adapter in it. None: no adapter of the stack changes this product."""
        own_MI = x_NI if self.rows is None else x_NI.index_select(0, self.rows)
        return self.stack.addition(own_MI, product, self.others(len(product.widths)))


class StackedStep:
    """The adapters of one step's rows. ``trained``: by row and site, whether its adapter is there; None: it has none"""

    def __init__(self, slices: Sequence[_Slice], rest: LoraBatch | None, trained: Sequence[tuple[bool, ...] | None]):
        self.stacks = [part.stack for part in slices]
        self._slices, self._rest, self._trained = slices, rest, trained
        self._base_only: dict[Sites, torch.Tensor | None] = {}

    def addition(self, x_NI: torch.Tensor, product: Product) -> torch.Tensor | None:
        """[N, O], all outputs of ``product`` side by side, which the base's product is added to; 0 at
        rows without an adapter. None: no adapter of the step changes it."""
        found: torch.Tensor | None = None
        for part in self._slices:
            addition = part.addition(x_NI, product)
            if addition is None:
                continue
            if part.rows is None:
                found = addition
                continue
            if found is None:
                found = x_NI.new_zeros(len(x_NI), sum(product.widths))
            found.index_copy_(0, part.rows, addition)
        if self._rest is not None:
            for sites, columns in product.by_output():
                chosen = [(site, own) for site, own in zip(sites, columns) if self._rest.trained(site)]
                if not chosen:
                    continue
                if found is None:
                    found = x_NI.new_zeros(len(x_NI), sum(product.widths))
                lora_add(x_NI, [found[:, own] for _, own in chosen], [site for site, _ in chosen], self._rest)
        return found

    def base_only(self, product: Product) -> torch.Tensor | None:
        """bool [N, 1]: rows that no adapter changes in this product; None where there are none."""
        if product.sites not in self._base_only:
            base_only = [flags is None or not any(flags[site] for site in product.sites) for flags in self._trained]
            self._base_only[product.sites] = torch.tensor(base_only)[:, None] if any(base_only) else None
        return self._base_only[product.sites]


class StackedAdapters:
    """One per sampler. ``products``: all that adapters may change, the head included."""

    def __init__(self, bank: AdapterBank, products: Sequence[Product], *, max_bytes: int = MAX_BYTES):
        """``max_bytes``: of all stacks together."""
        self._bank = bank
        self._max_bytes = max_bytes
        self._products = products
        self._stacks: list[_Stack] = []
        self._generations: dict[RowRef, int] = {}
        """Of those that are in a stack, or are to be in none."""
        self._used: dict[RowRef, int] = {}
        """Of those, the number of the last step that each was in."""
        self._number = 0
        """Of the step."""
        self._wasteful_steps = 0
        self._usable: dict[int, bool] = {}
        """By width."""
        self._last: tuple[tuple[RowRef | None, ...], StackedStep] | None = None

    def step(self, rows: Sequence[RowRef | None]) -> StackedStep | None:
        """For a step with these rows, in any order, at least 8. None: no row has an adapter. Rows must be pinned: their
        weights stay as they are."""
        distinct = tuple(dict.fromkeys(row for row in rows if row is not None))
        if not distinct:
            return None
        self._number += 1
        for row in distinct:
            if self._generations.get(row) not in (None, self._bank.row_generation(row)):
                self._drop(row)
        self._wasteful_steps = self._wasteful_steps + 1 if self._is_wasteful(distinct) else 0
        if self._wasteful_steps == WASTEFUL_STEPS:
            self._forget()
        missing = sorted((row for row in distinct if row not in self._generations), key=lambda row: -row.rank_bucket)
        self._used |= dict.fromkeys(distinct, self._number)
        for index, row in enumerate(missing):
            self._add(row, sum(other.rank_bucket for other in missing[index:]))
        if self._last is None or self._last[0] != tuple(rows):
            self._last = (tuple(rows), self.among(rows))
        step = self._last[1]
        for stack in step.stacks:
            stack.steps += 1
            if stack.steps == STEPS_BEFORE_PREPACKING and self._has_room(self._num_bytes(stack.num_columns)):
                stack.prepacked = {sites: weights.prepacked() for sites, weights in stack.weights.items()}
        return step

    def among(self, rows: Sequence[RowRef | None]) -> StackedStep:
        """For some rows of the last step, at least 8."""
        by_stack = [[n for n, row in enumerate(rows) if row in stack.columns] for stack in self._stacks]
        used = [(stack, own) for stack, own in zip(self._stacks, by_stack) if own]
        stacked = {n for _, own in used for n in own}
        slices: list[_Slice] = []
        for stack, own in used:
            columns = [None if row is None else stack.columns.get(row) for row in rows]
            if len(used) == 1 and 2 * len(own) >= len(rows):
                slices.append(_Slice(stack, None, columns))
            else:
                own += own[:1] * (MIN_ROWS - len(own))
                slices.append(_Slice(stack, torch.tensor(own), [columns[n] for n in own]))
        segments: list[Segment] = []
        for index, row in enumerate(rows):
            if row is None or index in stacked:
                continue
            start = index
            if segments and segments[-1].row == row and segments[-1].end == index:
                start = segments.pop().start
            segments.append(Segment(start=start, end=index + 1, row=row))
        rest = ForwardBatch(seq_lens=(1,) * len(rows), segments=tuple(segments))
        trained = [None if row is None else self._bank.trained(self._bank.lora(row)) for row in rows]
        return StackedStep(slices, LoraBatch.of(rest, self._bank), trained)

    def _forget(self) -> None:
        self._stacks, self._generations, self._used, self._last = [], {}, {}, None
        self._wasteful_steps = 0

    def _drop(self, row: RowRef) -> None:
        """Its weights are others now, or its columns another's."""
        del self._generations[row], self._used[row]
        for stack in self._stacks:
            stack.columns.pop(row, None)
        self._last = None

    def _is_wasteful(self, distinct: Sequence[RowRef]) -> bool:
        """Less than half of the columns that a step of these reads are theirs."""
        own = [sum(row.rank_bucket for row in distinct if row in stack.columns) for stack in self._stacks]
        num_read = sum(stack.num_columns for stack, used in zip(self._stacks, own) if used)
        return num_read > WIDTHS[0] and 2 * sum(own) < num_read

    # ------------------------------------------------------------------------------------------------ stacks
    def _add(self, row: RowRef, ahead: int) -> None:
        """Into columns that nobody has, else into those of adapters that are not used any more, else into a stack that
        is widened, or a new one. Into none where there is no room, or its numbers do not allow it. ``ahead``: the
        columns that are still to be found in this step, its own among them."""
        self._last = None
        self._generations[row] = self._bank.row_generation(row)
        if not self._is_stackable(row):
            return
        width = row.rank_bucket
        in_use = {other for other, number in self._used.items() if number > self._number - KEPT_STEPS}
        for kept in (self._generations, in_use):
            for stack in self._stacks:
                if (columns := stack.gap(width, kept)) is not None:
                    self._copy(row, stack, columns)
                    return
        if self._stacks:
            last = self._stacks[-1]
            fits = [w for w in WIDTHS if w > last.num_columns and last.gap(width, in_use, w) is not None]
            num_columns = self._chosen_width(fits, last.num_columns + ahead)
            if num_columns is not None and self._stacks[-1:] == [last]:
                self._stacks[-1] = last.widened(self._products, num_columns)
                columns = last.gap(width, in_use, num_columns)
                assert columns is not None
                self._copy(row, self._stacks[-1], columns)
                return
        if (num_columns := self._chosen_width([w for w in WIDTHS if w >= width], ahead)) is not None:
            self._stacks.append(_Stack(num_columns=num_columns))
            self._copy(row, self._stacks[-1], slice(0, width))

    def _chosen_width(self, widths: Sequence[int], wanted: int) -> int | None:
        """Of those that can be had the least that is no less than ``wanted``, else the largest."""
        ordered = [w for w in widths if w >= wanted] + [w for w in reversed(widths) if w < wanted]
        return next((w for w in ordered if self._is_usable(w) and self._has_room(self._num_bytes(w))), None)

    def _copy(self, row: RowRef, stack: _Stack, columns: slice) -> None:
        for other, own in list(stack.columns.items()):
            if own.start < columns.stop and columns.start < own.stop:
                self._drop(other)
        stack.columns[row] = columns
        stack.prepacked, stack.steps = None, 0
        lora, rank, layout = self._bank.lora(row), row.rank_bucket, self._bank.layout(row.rank_bucket)
        trained, scale = self._bank.trained(lora), SCALE_NUMERATOR / lora.rank
        row_P = self._bank.compute_slab(rank)[row.slot]
        for product in self._products:
            weights = stack.weights.get(product.sites)
            if weights is None:
                if not any(trained[site] for site in product.sites):
                    continue
                weights = stack.weights[product.sites] = _Weights.zeros(product, stack.num_columns, row_P.dtype)
            for site, a_CI, b_OC in weights.parts(product, stack.num_columns):  # 0 where it is not trained
                a_start, b_start = layout.a_offset[site], layout.b_offset[site]
                torch.mul(row_P[a_start : a_start + rank * a_CI.shape[1]].view(rank, -1), scale, out=a_CI[columns])
                b_OC[:, columns] = row_P[b_start : b_start + rank * len(b_OC)].view(-1, rank)

    def _has_room(self, num_bytes: int) -> bool:
        """What served none of the last steps makes room."""

        def taken() -> int:
            return sum(self._num_bytes(s.num_columns) * (1 if s.prepacked is None else 2) for s in self._stacks)

        if taken() + num_bytes > self._max_bytes:
            used = {row for row, number in self._used.items() if number > self._number - KEPT_STEPS}
            self._stacks = [stack for stack in self._stacks if not used.isdisjoint(stack.columns)]
            for row in self._generations.keys() - used:
                self._drop(row)
        return taken() + num_bytes <= self._max_bytes

    def _num_bytes(self, num_columns: int) -> int:
        """Of a stack."""
        return sum(product.num_weights(num_columns) for product in self._products) * self._bank.dtype.itemsize

    def _is_stackable(self, row: RowRef) -> bool:
        """Finite, and with a scale that rounds nothing, wherever it is multiplied in."""
        scale = SCALE_NUMERATOR / self._bank.lora(row).rank
        least, most = self._bank.compute_slab(row.rank_bucket)[row.slot].aminmax()
        largest = max(-least.item(), most.item()) * max(scale, 1)
        has_nan = math.isnan(least.item())
        return math.frexp(scale)[0] == 0.5 and not has_nan and largest <= torch.finfo(self._bank.dtype).max

    def _is_usable(self, num_columns: int) -> bool:
        """Stacks so wide have the bits of the segments' own products; asked once."""
        if num_columns not in self._usable:
            shapes = {
                (product.in_features, tuple(map(len, product.outputs)), product.widths): product
                for product in self._products
            }
            self._usable[num_columns] = all(
                _has_same_bits(product, num_columns, self._bank.dtype) for product in shapes.values()
            )
            if not self._usable[num_columns]:
                logger.warning("adapters are not stacked in %d columns: other bits", num_columns)
        return self._usable[num_columns]


def _has_same_bits(product: Product, num_columns: int, dtype: torch.dtype) -> bool:
    """Of every rank bucket in its last columns; with more rows the first."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weights = _Weights.zeros(product, num_columns, dtype)
    for _, a_CI, b_OC in weights.parts(product, num_columns):
        a_CI.copy_(random(*a_CI.shape))
        b_OC.copy_(random(*b_OC.shape))
    stacks = [_Stack(num_columns=num_columns, weights={product.sites: w}) for w in (weights, weights.prepacked())]
    buckets = [bucket for bucket in RANK_BUCKETS if bucket <= num_columns]
    for num_rows, rank_bucket in [(MIN_ROWS, bucket) for bucket in buckets] + [(TRIED_ROWS, buckets[0])]:
        start = (num_columns // rank_bucket - 1) * rank_bucket
        own, x_NI = slice(start, start + rank_bucket), random(num_rows, product.in_features)
        expected = []
        for _, a_CI, b_OC in weights.parts(product, num_columns):
            # A row alone would take another path (see ``lora.products``)
            h_NR = prepacked.product(x_NI, a_CI[own], None, None)
            zeros_NO = x_NI.new_zeros(num_rows, len(b_OC))
            expected.append(prepacked.add_product(zeros_NO, h_NR, b_OC[:, own].contiguous(), None))
        for stack in stacks:
            found = _Slice(stack, None, [own] * num_rows).addition(x_NI, product)
            if found is None or not torch.equal(found, torch.cat(expected, dim=1)):
                return False
    return True
