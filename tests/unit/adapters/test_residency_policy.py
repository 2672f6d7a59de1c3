"""The policy alone, over things that are nothing but four numbers: who leaves, to where, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from descant.adapters.offload import ADAPTER_SUFFIX, CopyStream, HostCopy, SpillDirectory
from descant.adapters.residency import DeviceBudget, Offloadable, Residency
from descant.errors import ServerError

BYTES = 16
CPU = torch.device("cpu")


@dataclass(slots=True, kw_only=True, eq=False)
class Mutable(Offloadable):
    mutable: ClassVar[bool] = True
    name: str
    rows: torch.Tensor | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        return f"item {self.name}"

    @property
    def file_name(self) -> str:
        return self.name + ADAPTER_SUFFIX

    @property
    def is_resident(self) -> bool:
        return self.rows is not None

    def copy_out(self) -> HostCopy:
        assert self.rows is not None
        return HostCopy(tensors={"row": self.rows.clone()})

    def free_rows(self) -> None:
        self.rows = None

    def mismatch(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        return None if tensors["row"].shape == (4,) else "it has another shape"


class Immutable(Mutable):
    mutable: ClassVar[bool] = False


class Desk:
    """Items on a device with room for ``device`` of them and a host with room for ``host``."""

    def __init__(self, kind: type[Mutable], *, device: int, host: int, directory: Path):
        self.items = {name: kind(name=name, expected_as=name) for name in "abcde"}
        self.residency = Residency(host_bytes=host * BYTES, spill=SpillDirectory(directory), copies=CopyStream(CPU))
        self.budget = DeviceBudget(
            max_bytes=device * BYTES,
            used_bytes=lambda: BYTES * sum(item.is_resident for item in self.items.values()),
            items=self.items.values,
        )

    def use(self, names: str, fill: Callable[[Mutable, HostCopy | None], None] | None = None) -> None:
        """Each in turn; a new one is its name's number."""
        for item in (self.items[name] for name in names):
            if not item.is_resident:
                self.residency.load(
                    item,
                    make_room=lambda: self.residency.make_room(self.budget, lambda: BYTES),
                    fill=lambda copy, item=item: (fill or put)(item, copy),
                )
            self.residency.touch(item)

    def where(self) -> dict[str, str]:
        """R in rows, H on the host, F in a file."""
        return {
            name: "R" * item.is_resident + "H" * (item.host is not None) + "F" * (item.file is not None)
            for name, item in self.items.items()
        }


def put(item: Mutable, copy: HostCopy | None) -> None:
    item.rows = torch.full((4,), float(ord(item.name))) if copy is None else copy.tensors["row"].clone()


@pytest.fixture(params=[Mutable, Immutable])
def kind(request: pytest.FixtureRequest) -> type[Mutable]:
    return request.param


def test_the_longest_unused_leaves_and_comes_back_as_it_was(kind: type[Mutable], tmp_path: Path) -> None:
    desk = Desk(kind, device=2, host=9, directory=tmp_path)
    desk.use("abac")
    assert desk.where() == {"a": "R", "b": "H", "c": "R", "d": "", "e": ""}
    desk.use("b")
    assert desk.where() == {"a": "H", "b": "R", "c": "R", "d": "", "e": ""}
    rows = desk.items["b"].rows
    assert rows is not None
    assert rows.tolist() == [ord("b")] * 4


def test_what_is_pinned_stays_though_the_limit_is_passed(kind: type[Mutable], tmp_path: Path) -> None:
    desk = Desk(kind, device=2, host=9, directory=tmp_path)
    for name in "ab":
        desk.use(name)
        desk.items[name].pins += 1
    desk.use("c")
    assert desk.where() == {"a": "R", "b": "R", "c": "R", "d": "", "e": ""}


@pytest.mark.parametrize(
    ("kind", "left"),
    [pytest.param(Mutable, "", id="its file would be stale"), pytest.param(Immutable, "F", id="its file stays true")],
)
def test_what_becomes_of_the_file_of_one_that_comes_back(kind: type[Mutable], left: str, tmp_path: Path) -> None:
    desk = Desk(kind, device=1, host=0, directory=tmp_path)
    desk.use("ab")
    desk.residency.settle()
    assert desk.where()["a"] == "F"
    desk.use("a")
    assert desk.where()["a"] == "R" + left
    desk.residency.settle()
    assert len(list(tmp_path.iterdir())) == 1 + len(left), "b's, and what is left of a's"


@pytest.mark.parametrize(
    ("kind", "goes"),
    [pytest.param(Mutable, "c", id="others before it"), pytest.param(Immutable, "a", id="by its age")],
)
def test_who_goes_to_a_file_when_an_old_one_comes_to_a_full_host(
    kind: type[Mutable], goes: str, tmp_path: Path
) -> None:
    """``a`` is older than ``c`` and leaves after it, since it was pinned."""
    desk = Desk(kind, device=2, host=1, directory=tmp_path)
    desk.use("a")
    desk.items["a"].pins += 1
    desk.use("cd")
    assert desk.where() == {"a": "R", "b": "", "c": "H", "d": "R", "e": ""}
    desk.items["a"].pins -= 1
    desk.use("e")
    desk.residency.settle()
    assert [name for name, places in desk.where().items() if places == "F"] == [goes]


def test_a_host_with_room_for_one_swaps_two_without_a_file(tmp_path: Path) -> None:
    desk = Desk(Mutable, device=1, host=1, directory=tmp_path)
    desk.use("abab")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_lost_where_loading_fails(kind: type[Mutable], tmp_path: Path) -> None:
    def full(item: Mutable, copy: HostCopy | None) -> None:
        raise ServerError("no memory for it")

    desk = Desk(kind, device=1, host=9, directory=tmp_path)
    desk.use("ab")
    with pytest.raises(ServerError, match="no memory for it"):
        desk.use("a", fill=full)
    assert desk.where()["a"] == "H"
    desk.use("a")
    rows = desk.items["a"].rows
    assert rows is not None
    assert rows.tolist() == [ord("a")] * 4


def test_who_will_be_asked_for_leaves_after_who_will_not(kind: type[Mutable], tmp_path: Path) -> None:
    desk = Desk(kind, device=3, host=9, directory=tmp_path)
    desk.use("abc")
    desk.residency.expect(["a"], keep=["d"])
    desk.use("d")
    assert [name for name, places in desk.where().items() if places == "H"] == ["b"]
