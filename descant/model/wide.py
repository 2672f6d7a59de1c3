"""Many adapters in a decode step on CPU: their weights side by side, one packed product a side.

    h [N, G·R] = x Aᵀ of all G adapters at once;  a row's columns of other adapters are set to 0;  y += h Bᵀ

A product of a few rows costs the reading of its weights and a call of the library (some 10 µs), so each row may as well
be multiplied by everybody's A: 8 adapters, 576 → 576, rank 16, took 74 + 72 µs in batched products over the slab, of
which half was the copy of weights that do not lie together, and takes 14 + 15 µs here.

Nobody's numbers reach another: the intermediates of other adapters are overwritten, not multiplied by 0, and as the
second product does multiply those zeros with everybody's B, only adapters whose weights are finite are in a stack. The
bits are those of the segments' own products (tried for each number and class of adapters when first used).

Stacks are copies, made when the same adapters have come up in ``PATIENCE`` steps running. Until then, and for what
fits no stack, the segments' products do it.

Legend: N rows, I in, O out, R rank class, G adapters of a stack, S sites that share an input.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from descant.model import packed
from descant.model.bank import AdapterBank
from descant.model.lora import LoraPass, lora_add
from descant.model.passes import MIN_ROWS, Pass, RowRef, Segment
from descant.types import SCALE_NUMERATOR

logger = logging.getLogger(__name__)

PATIENCE = 3
"""Steps: a stack of 8 adapters of SmolLM2 takes about as long to make as three steps without it lose."""

MAX_COLUMNS = 256
"""G · R of a stack: more arithmetic for every row than reading the weights takes."""

MAX_BYTES = 1 << 30
"""Of all stacks together."""

Sites = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Linear layers of one input. ``parts``: the sites of each output tensor (all sites, in order, once); ``widths`` of
    the sites."""

    in_features: int
    parts: tuple[Sites, ...]
    widths: tuple[int, ...]

    @property
    def sites(self) -> Sites:
        return tuple(site for part in self.parts for site in part)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Of one product, packed: ``a`` [S · G · R, I], scales in it; ``b`` of each part [O, its sites · G · R]."""

    a: torch.Tensor
    b: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """``rows`` of one rank class and where each stands in it, ``weights`` by a product's sites."""

    rank_class: int
    places: dict[RowRef, int]
    weights: dict[Sites, _Weights]
    num_bytes: int

    @property
    def num_columns(self) -> int:
        return len(self.places) * self.rank_class


class _Slice:
    """Rows ``rows`` of a step (None: all; at least 8) by one stack."""

    def __init__(self, stack: _Stack, rows: slice | None, places: Sequence[int | None]):
        """``places`` of the rows' adapters in the stack; None: of none in it."""
        self.stack, self.rows = stack, rows
        own_NG = torch.tensor([[place == index for index in range(len(stack.places))] for place in places])
        self._others_NC = ~own_NG.repeat_interleave(stack.rank_class, dim=1)
        self._others = {1: self._others_NC}

    def others(self, num_sites: int) -> torch.Tensor:
        """bool [N, S · G · R]: columns of a row that are not its own adapter's."""
        if num_sites not in self._others:
            self._others[num_sites] = self._others_NC.repeat(1, num_sites)
        return self._others[num_sites]

    def add(self, x_NI: torch.Tensor, ys: list[torch.Tensor], product: Product) -> None:
        weights = self.stack.weights.get(product.sites)
        if weights is None:
            return
        h_NC = packed.linear(x_NI if self.rows is None else x_NI[self.rows], weights.a, None)
        h_NC.masked_fill_(self.others(len(product.widths)), 0)
        end = 0
        for index, (sites, b) in enumerate(zip(product.parts, weights.b)):
            start, end = end, end + len(sites) * self.stack.num_columns
            own_NC = h_NC if len(ys) == 1 else h_NC[:, start:end]
            if self.rows is None:
                ys[index] = packed.linear_add(own_NC, b, ys[index])
            else:
                ys[index][self.rows] = packed.linear_add(own_NC, b, ys[index][self.rows])


class WideStep:
    """The adapters of one step's rows."""

    def __init__(self, slices: Sequence[_Slice], rest: LoraPass | None):
        self._slices, self._rest = slices, rest

    def add(self, x_NI: torch.Tensor, ys: Sequence[torch.Tensor], product: Product) -> Sequence[torch.Tensor]:
        """``ys`` [N, O] of each part of ``product``, columns of one tensor maybe, which are used up; with the adapters'
        additions."""
        found = list(ys)
        for part in self._slices:
            part.add(x_NI, found, product)
        if self._rest is not None:
            widths = iter(product.widths)
            for y_NO, sites in zip(found, product.parts):
                columns = y_NO.split([next(widths) for _ in sites], dim=1)
                chosen = [(site, y) for site, y in zip(sites, columns) if self._rest.trained(site)]
                if chosen:
                    lora_add(x_NI, [y for _, y in chosen], [site for site, _ in chosen], self._rest)
        return found


class WideAdapters:
    """One per sampler. ``products``: all that adapters may change, the head included."""

    def __init__(self, bank: AdapterBank, products: Sequence[Product]):
        self._bank = bank
        self._products = products
        self._stacks: list[_Stack] = []
        self._stamps: dict[RowRef, int] = {}
        self._wanted: tuple[RowRef, ...] = ()
        self._times = 0
        self._tried: dict[tuple[int, int], bool] = {}
        self._last: tuple[tuple[RowRef | None, ...], WideStep] | None = None

    def step(self, rows: Sequence[RowRef | None]) -> WideStep | None:
        """For a step with these rows, sorted (rank class, then slot; None anywhere), at least 8. None: no row has an
        adapter. Rows must be pinned: their weights stay as they are."""
        distinct = tuple(dict.fromkeys(row for row in rows if row is not None))
        if not distinct:
            return None
        if any(self._bank.stamp(row) != stamp for row, stamp in self._stamps.items() if row in distinct):
            self._forget()
        if self._last is not None and self._last[0] == tuple(rows):
            return self._last[1]
        if not self._serve(distinct):
            self._times = self._times + 1 if distinct == self._wanted else 1
            self._wanted = distinct
            if self._times < PATIENCE:
                return self._resolve(rows)
            self._stack(distinct)
        step = self._resolve(rows)
        self._last = (tuple(rows), step)
        return step

    def _forget(self) -> None:
        self._stacks, self._stamps, self._last = [], {}, None

    def _serve(self, distinct: Sequence[RowRef]) -> bool:
        """Every adapter has been looked at, and those that have ended are not the most of what is read."""
        return all(row in self._stamps for row in distinct) and 2 * len(distinct) >= len(self._stamps)

    def _resolve(self, rows: Sequence[RowRef | None]) -> WideStep:
        slices: list[_Slice] = []
        stacked: set[RowRef] = set()
        for stack in self._stacks:
            found = [index for index, row in enumerate(rows) if row in stack.places]
            if not found:
                continue
            stacked |= stack.places.keys()
            start, end = found[0], found[-1] + 1
            end = min(max(end, start + MIN_ROWS), len(rows))
            start = max(0, min(start, end - MIN_ROWS))
            whole = (start, end) == (0, len(rows))
            places = [None if row is None else stack.places.get(row) for row in rows[start:end]]
            slices.append(_Slice(stack, None if whole else slice(start, end), places))
        segments: list[Segment] = []
        for index, row in enumerate(rows):
            if row is None or row in stacked:
                continue
            start = index
            if segments and segments[-1].row == row and segments[-1].end == index:
                start = segments.pop().start
            segments.append(Segment(start=start, end=index + 1, row=row))
        rest = Pass(seq_lens=(1,) * len(rows), segments=tuple(segments))
        return WideStep(slices, LoraPass.of(rest, self._bank))

    # ------------------------------------------------------------------------------------------------ stacks
    def _stack(self, distinct: Sequence[RowRef]) -> None:
        """New stacks of these adapters, as many as fit."""
        self._forget()
        self._stamps = {row: self._bank.stamp(row) for row in distinct}
        by_class: dict[int, list[RowRef]] = {}
        for row in distinct:
            if self._is_stackable(row):
                by_class.setdefault(row.rank_class, []).append(row)
        room = MAX_BYTES
        for rank_class, members in by_class.items():
            most = max(1, MAX_COLUMNS // rank_class)
            for first in range(0, len(members), most):
                chosen = members[first : first + most]
                if self._num_bytes(rank_class, len(chosen)) > room or not self._has_same_bits(rank_class, len(chosen)):
                    continue
                self._stacks.append(self._stack_of(chosen))
                room -= self._stacks[-1].num_bytes

    def _is_stackable(self, row: RowRef) -> bool:
        """Finite, and with a scale that rounds nothing, wherever it is multiplied in."""
        scale = SCALE_NUMERATOR / self._bank.lora(row).rank
        weights = self._bank.work_slab(row.rank_class)[row.slot]
        return math.frexp(scale)[0] == 0.5 and bool((weights * scale).isfinite().all())

    def _num_bytes(self, rank_class: int, num_adapters: int) -> int:
        return self._bank.layout(rank_class).row * num_adapters * self._bank.dtype.itemsize

    def _stack_of(self, rows: Sequence[RowRef]) -> _Stack:
        rank_class = rows[0].rank_class
        slots = torch.tensor([row.slot for row in rows])
        scales = torch.tensor([SCALE_NUMERATOR / self._bank.lora(row).rank for row in rows])
        layout, slab_SP = self._bank.layout(rank_class), self._bank.work_slab(rank_class)
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
                    part(layout.a_offset[site], rank_class, product.in_features)
                    .mul_(scales.to(slab_SP.dtype)[:, None, None])
                    .flatten(0, 1)
                    for site in product.sites
                ]
            )
            bs = tuple(
                torch.block_diag(
                    *(
                        part(layout.b_offset[site], widths[site], rank_class).transpose(0, 1).flatten(1)
                        for site in sites
                    )
                )
                for sites in product.parts
            )
            weights[product.sites] = _Weights(a=packed.reorder(a_CI), b=tuple(packed.reorder(b_OC) for b_OC in bs))
            num_bytes += sum(tensor.nbytes for tensor in (a_CI, *bs))
        places = {row: index for index, row in enumerate(rows)}
        return _Stack(rank_class=rank_class, places=places, weights=weights, num_bytes=num_bytes)

    def _has_same_bits(self, rank_class: int, num_adapters: int) -> bool:
        """As the segments' own products, for every shape; asked once for each number of adapters."""
        key = (rank_class, num_adapters)
        if key not in self._tried:
            shapes = {(product.in_features, width) for product in self._products for width in product.widths}
            self._tried[key] = all(_same_bits(*shape, *key, self._bank.dtype) for shape in shapes)
            if not self._tried[key]:
                logger.warning("%d adapters of rank class %d are not stacked: other bits", num_adapters, rank_class)
        return self._tried[key]


def _same_bits(in_features: int, out_features: int, rank_class: int, num_adapters: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    a_GRI, b_GOR = random(num_adapters, rank_class, in_features), random(num_adapters, out_features, rank_class)
    x_NI, y_NO = random(MIN_ROWS, in_features), random(MIN_ROWS, out_features)
    places = [index % num_adapters for index in range(MIN_ROWS)]
    expected_NO = y_NO.clone()
    for index, place in enumerate(places):  # a row alone would take another path (see ``lora``)
        expected_NO[index] = torch.addmm(y_NO, x_NI @ a_GRI[place].t(), b_GOR[place].t())[index]
    weights = _Weights(
        a=packed.reorder(a_GRI.flatten(0, 1)), b=(packed.reorder(b_GOR.transpose(0, 1).flatten(1).contiguous()),)
    )
    product = Product(in_features=in_features, parts=((0,),), widths=(out_features,))
    stack = _Stack(
        rank_class=rank_class,
        places={RowRef(rank_class=rank_class, slot=index): index for index in range(num_adapters)},
        weights={(0,): weights},
        num_bytes=0,
    )
    found = [y_NO]
    _Slice(stack, None, places).add(x_NI, found, product)
    return torch.equal(found[0], expected_NO)
