"""Stacked adapters, for decode steps on CPU: weights of many side by side, one prepacked product for A and one for B.

    h [N, G·R] = x Aᵀ of all G adapters at once;  a row's columns of other adapters are set to 0;  h Bᵀ

A product of a few rows costs the reading of its weights and a call of the library (some 10 µs), so each row may as well
be multiplied by every A: 8 adapters, 576 → 576, rank 16, took 74 + 72 µs in batched products over the slab, of
which half was the copy of weights that do not lie together, and takes 14 + 15 µs here.

One adapter's numbers reach no other: the intermediates of other adapters are overwritten, not multiplied by 0, and as
the second product does multiply those zeros with every B, only adapters whose weights are finite are in a stack. The
bits are those of the segments' own products (tried for each number and class of adapters when first used).

Stacks are copies, made when the same adapters have come up in ``STEPS_BEFORE_STACKING`` steps running. Until then, and
for what fits no stack, the segments' products do it. An adapter that comes to others gets a stack of its own, and one
that leaves or changes is left out of its stack: with eight clients some adapter is new every few steps. Once most of
what is read is of adapters that have left, or there are many stacks, they are made anew.

Legend: N rows, I in, O out, R rank bucket, G adapters of a stack, S sites that share an input.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from descant.adapters.bank import AdapterBank
from descant.adapters.slots import ComputeSlot, RowRef
from descant.model.cpu import prepacked
from descant.model.forward_batch import MIN_ROWS, ForwardBatch, Segment
from descant.model.lora.batch import LoraBatch
from descant.model.lora.products import lora_add
from descant.types import SCALE_NUMERATOR

logger = logging.getLogger(__name__)

STEPS_BEFORE_STACKING = 3
"""Steps: a stack of 8 adapters of SmolLM2 takes about as long to make as three steps without it lose."""

MAX_COLUMNS = 256
"""G · R of a stack: more arithmetic for every row than reading the weights takes."""

MAX_STACKS = 8
"""Of one step: each is two more calls of the library for every product."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Of one product, prepacked: ``a`` [S · G · R, I], scales in it; ``b`` of each output [O, its sites · G · R]."""

    a: torch.Tensor
    b: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """Rows of one rank bucket by their ``indices`` in it, ``weights`` by a product's sites. It was made of
    ``num_adapters``, of which some may be served by it no more."""

    rank_bucket: int
    num_adapters: int
    indices: dict[RowRef, int]
    weights: dict[Sites, _Weights]
    num_bytes: int

    @property
    def num_columns(self) -> int:
        return self.num_adapters * self.rank_bucket


class _Slice:
    """Rows ``rows`` of a step (None: all; at least 8) by one stack."""

    def __init__(self, stack: _Stack, rows: slice | None, indices: Sequence[int | None]):
        """``indices`` of the rows' adapters in the stack; None: of none in it."""
        self.stack, self.rows = stack, rows
        own_NG = torch.tensor([[own == index for index in range(stack.num_adapters)] for own in indices])
        self._others_NC = ~own_NG.repeat_interleave(stack.rank_bucket, dim=1)
        self._others = {1: self._others_NC}

    def others(self, num_sites: int) -> torch.Tensor:
        """bool [N, S · G · R]: columns of a row that are not its own adapter's."""
        if num_sites not in self._others:
            self._others[num_sites] = self._others_NC.repeat(1, num_sites)
        return self._others[num_sites]

    def addition(self, x_NI: torch.Tensor, product: Product) -> torch.Tensor | None:
        """[its rows, O]; 0 at those of no adapter in it. None: no adapter of the stack changes this product."""
        weights = self.stack.weights.get(product.sites)
        if weights is None:
            return None
        h_NC = prepacked.linear(x_NI if self.rows is None else x_NI[self.rows], weights.a, None)
        h_NC.masked_fill_(self.others(len(product.widths)), 0)
        columns = h_NC.split([len(sites) * self.stack.num_columns for sites in product.outputs], dim=1)
        outputs = [prepacked.linear(own_NC, b, None) for own_NC, b in zip(columns, weights.b, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class StackedStep:
    """The adapters of one step's rows. ``trained``: by row and site, whether its adapter is there; None: it has none"""

    def __init__(self, slices: Sequence[_Slice], rest: LoraBatch | None, trained: Sequence[tuple[bool, ...] | None]):
        self._slices, self._rest, self._trained = slices, rest, trained
        self._base_only: dict[Sites, torch.Tensor | None] = {}

    def addition(self, x_NI: torch.Tensor, product: Product) -> torch.Tensor | None:
        """[N, O], all outputs of ``product`` side by side, which the base's product is added to; 0 at
        rows without an adapter. None: no adapter of the step changes it."""
        found: torch.Tensor | None = None
        for part in self._slices:
            addition_NO = part.addition(x_NI, product)
            if addition_NO is None:
                continue
            if found is None and part.rows is None:
                found = addition_NO
                continue
            if found is None:
                found = x_NI.new_zeros(len(x_NI), sum(product.widths))
            found[slice(None) if part.rows is None else part.rows].add_(addition_NO)  # where one is, others are 0
        if self._rest is not None:
            for sites, columns in _by_output(product):
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


def _by_output(product: Product) -> Iterator[tuple[Sites, list[slice]]]:
    """The sites of each output, and their columns of all."""
    ends = list(accumulate(product.widths))
    columns = iter([slice(end - width, end) for end, width in zip(ends, product.widths)])
    for sites in product.outputs:
        yield sites, [next(columns) for _ in sites]


class StackedAdapters:
    """One per sampler. ``products``: all that adapters may change, the head included."""

    def __init__(self, bank: AdapterBank, products: Sequence[Product], *, max_bytes: int = MAX_BYTES):
        """``max_bytes``: of all stacks together."""
        self._bank = bank
        self._max_bytes = max_bytes
        self._products = products
        self._stacks: list[_Stack] = []
        self._generations: dict[RowRef, int] = {}
        self._candidates: tuple[RowRef, ...] = ()
        self._times_seen = 0
        self._tried: dict[tuple[int, int], bool] = {}
        self._last: tuple[tuple[RowRef | None, ...], StackedStep] | None = None

    def step(self, rows: Sequence[RowRef | None]) -> StackedStep | None:
        """For a step with these rows, sorted (rank bucket, then slot; None anywhere), at least 8. None: no row has an
        adapter. Rows must be pinned: their weights stay as they are."""
        distinct = tuple(dict.fromkeys(row for row in rows if row is not None))
        if not distinct:
            return None
        for row in distinct:
            if self._generations.get(row) not in (None, self._bank.row_generation(row)):
                self._drop(row)
        if self._last is not None and self._last[0] == tuple(rows):
            return self._last[1]
        anew = self._is_wasteful(distinct)
        candidates = distinct if anew else tuple(row for row in distinct if row not in self._generations)
        if candidates:
            self._times_seen = self._times_seen + 1 if candidates == self._candidates else 1
            self._candidates = candidates
            if self._times_seen < STEPS_BEFORE_STACKING:
                return self._resolve(rows)
            if anew:
                self._forget()
            self._stack(candidates, distinct)
        step = self._resolve(rows)
        self._last = (tuple(rows), step)
        return step

    def _forget(self) -> None:
        self._stacks, self._generations, self._last = [], {}, None

    def _drop(self, row: RowRef) -> None:
        """Its weights are others now."""
        del self._generations[row]
        for stack in self._stacks:
            stack.indices.pop(row, None)
        self._stacks = [stack for stack in self._stacks if stack.indices]
        self._last = None

    def _is_wasteful(self, distinct: Sequence[RowRef]) -> bool:
        """Most of what a step of these reads is of other adapters, or in too many pieces."""
        served = [sum(row in stack.indices for row in distinct) for stack in self._stacks]
        num_read = sum(stack.num_adapters for stack, own in zip(self._stacks, served) if own)
        return 2 * sum(served) < num_read or sum(own > 0 for own in served) > MAX_STACKS

    def _resolve(self, rows: Sequence[RowRef | None]) -> StackedStep:
        slices: list[_Slice] = []
        stacked: set[RowRef] = set()
        for stack in self._stacks:
            found = [index for index, row in enumerate(rows) if row in stack.indices]
            if not found:
                continue
            stacked |= stack.indices.keys()
            start, end = found[0], found[-1] + 1
            end = min(max(end, start + MIN_ROWS), len(rows))
            start = max(0, min(start, end - MIN_ROWS))
            whole = (start, end) == (0, len(rows))
            indices = [None if row is None else stack.indices.get(row) for row in rows[start:end]]
            slices.append(_Slice(stack, None if whole else slice(start, end), indices))
        segments: list[Segment] = []
        for index, row in enumerate(rows):
            if row is None or row in stacked:
                continue
            start = index
            if segments and segments[-1].row == row and segments[-1].end == index:
                start = segments.pop().start
            segments.append(Segment(start=start, end=index + 1, row=row))
        rest = ForwardBatch(seq_lens=(1,) * len(rows), segments=tuple(segments))
        trained = [None if row is None else self._bank.trained(self._bank.lora(row)) for row in rows]
        return StackedStep(slices, LoraBatch.of(rest, self._bank), trained)

    # ------------------------------------------------------------------------------------------------ stacks
    def _stack(self, rows: Sequence[RowRef], distinct: Sequence[RowRef]) -> None:
        """New stacks of these adapters, as many as fit beside those that ``distinct``, a step's adapters, use."""
        by_bucket: dict[int, list[RowRef]] = {}
        for row in rows:
            self._generations[row] = self._bank.row_generation(row)
            if self._is_stackable(row):
                by_bucket.setdefault(row.rank_bucket, []).append(row)
        for rank_bucket, members in by_bucket.items():
            most = max(1, MAX_COLUMNS // rank_bucket)
            for first in range(0, len(members), most):
                chosen = members[first : first + most]
                if self._has_room(self._num_bytes(rank_bucket, len(chosen)), distinct) and self._has_same_bits(
                    rank_bucket, len(chosen)
                ):
                    self._stacks.append(self._stack_of(chosen))
        if len(self._stacks) > 2 * MAX_STACKS:
            self._keep_used(distinct)

    def _has_room(self, num_bytes: int, distinct: Sequence[RowRef]) -> bool:
        if sum(stack.num_bytes for stack in self._stacks) + num_bytes > self._max_bytes:
            self._keep_used(distinct)
        return sum(stack.num_bytes for stack in self._stacks) + num_bytes <= self._max_bytes

    def _keep_used(self, distinct: Sequence[RowRef]) -> None:
        """No stack but those that serve a step of these."""
        self._stacks = [stack for stack in self._stacks if any(row in stack.indices for row in distinct)]
        kept = {row for stack in self._stacks for row in stack.indices}.union(distinct)
        self._generations = {row: number for row, number in self._generations.items() if row in kept}

    def _is_stackable(self, row: RowRef) -> bool:
        """Finite, and with a scale that rounds nothing, wherever it is multiplied in."""
        scale = SCALE_NUMERATOR / self._bank.lora(row).rank
        weights = self._bank.compute_slab(row.rank_bucket)[row.slot]
        return math.frexp(scale)[0] == 0.5 and bool((weights * scale).isfinite().all())

    def _num_bytes(self, rank_bucket: int, num_adapters: int) -> int:
        return self._bank.layout(rank_bucket).row * num_adapters * self._bank.dtype.itemsize

    def _stack_of(self, rows: Sequence[RowRef]) -> _Stack:
        rank_bucket = rows[0].rank_bucket
        slots = torch.tensor([row.slot for row in rows])
        scales = torch.tensor([SCALE_NUMERATOR / self._bank.lora(row).rank for row in rows])
        layout, slab_SP = self._bank.layout(rank_bucket), self._bank.compute_slab(rank_bucket)
        trained = [self._bank.trained(self._bank.lora(row)) for row in rows]

        def part(offset: int, *shape: int) -> torch.Tensor:
            return slab_SP[:, offset : offset + math.prod(shape)].index_select(0, slots).view(-1, *shape)

        weights: dict[Sites, _Weights] = {}
        num_bytes = 0
        for product in self._products:
            if not any(flags[site] for flags in trained for site in product.sites):
                continue
            widths = dict(zip(product.sites, product.widths))
            a_CI = torch.cat(
                [
                    part(layout.a_offset[site], rank_bucket, product.in_features)
                    .mul_(scales.to(slab_SP.dtype)[:, None, None])
                    .flatten(0, 1)
                    for site in product.sites
                ]
            )
            bs = tuple(
                torch.block_diag(
                    *(
                        part(layout.b_offset[site], widths[site], rank_bucket).transpose(0, 1).flatten(1)
                        for site in sites
                    )
                )
                for sites in product.outputs
            )
            weights[product.sites] = _Weights(
                a=prepacked.reorder(a_CI), b=tuple(prepacked.reorder(b_OC) for b_OC in bs)
            )
            num_bytes += sum(tensor.nbytes for tensor in (a_CI, *bs))
        indices = {row: index for index, row in enumerate(rows)}
        return _Stack(
            rank_bucket=rank_bucket, num_adapters=len(rows), indices=indices, weights=weights, num_bytes=num_bytes
        )

    def _has_same_bits(self, rank_bucket: int, num_adapters: int) -> bool:
        """As the segments' own products, for every shape; asked once for each number of adapters."""
        key = (rank_bucket, num_adapters)
        if key not in self._tried:
            shapes = {(product.in_features, width) for product in self._products for width in product.widths}
            self._tried[key] = all(_same_bits(*shape, *key, self._bank.dtype) for shape in shapes)
            if not self._tried[key]:
                logger.warning("%d adapters of rank bucket %d are not stacked: other bits", num_adapters, rank_bucket)
        return self._tried[key]


def _same_bits(in_features: int, out_features: int, rank_bucket: int, num_adapters: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    a_GRI, b_GOR = random(num_adapters, rank_bucket, in_features), random(num_adapters, out_features, rank_bucket)
    x_NI, zeros_NO = random(MIN_ROWS, in_features), torch.zeros(MIN_ROWS, out_features, dtype=dtype)
    indices = [index % num_adapters for index in range(MIN_ROWS)]
    expected_NO = zeros_NO.clone()
    for index, own in enumerate(indices):  # a row alone would take another path (see ``lora.products``)
        h_NR = prepacked.product(x_NI, a_GRI[own], None, None)
        expected_NO[index] = prepacked.add_product(zeros_NO.clone(), h_NR, b_GOR[own], None)[index]
    weights = _Weights(
        a=prepacked.reorder(a_GRI.flatten(0, 1)), b=(prepacked.reorder(b_GOR.transpose(0, 1).flatten(1).contiguous()),)
    )
    product = Product(in_features=in_features, outputs=((0,),), widths=(out_features,))
    stack = _Stack(
        rank_bucket=rank_bucket,
        num_adapters=num_adapters,
        indices={RowRef(rank_bucket=rank_bucket, slot=ComputeSlot(index)): index for index in range(num_adapters)},
        weights={(0,): weights},
        num_bytes=0,
    )
    found_NO = _Slice(stack, None, indices).addition(x_NI, product)
    return found_NO is not None and torch.equal(found_NO, expected_NO)
