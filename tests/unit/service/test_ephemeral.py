"""Which weights saved without a name stay: by number, by age, by bytes."""

from __future__ import annotations

import pytest

from descant.errors import QuotaExceeded
from descant.service.ephemeral import EphemeralVersions, Limits
from descant.types import Version


def version(number: int, model: str = "s:train:0") -> Version:
    return Version(model_id=model, number=number)


def kept(keep: int = 3, sampled_s: float = 100.0, most: int | None = None) -> EphemeralVersions:
    return EphemeralVersions(Limits(keep=keep, keep_sampled_s=sampled_s, max_owner_bytes=most))


def add(
    versions: EphemeralVersions, *numbers: int, model: str = "s:train:0", owner: str = "alice", now: float = 0.0
) -> None:
    for number in numbers:
        versions.add(version(number, model), base="b", owner=owner, num_bytes=10, now=now)


def outdated(versions: EphemeralVersions, now: float) -> set[int]:
    return {version.number for version, _ in versions.outdated(now)}


def room_for(versions: EphemeralVersions, num_bytes: int, owner: str = "alice") -> list[int]:
    return [version.number for version, _ in versions.room_for(owner, num_bytes)]


def test_the_newest_stay_however_old():
    versions = kept()
    add(versions, 7, 1, 5, 3, 9)
    assert outdated(versions, 99.0) == set()
    assert outdated(versions, 101.0) == {1, 3}
    add(versions, 1, 2, model="s:train:1")
    assert outdated(versions, 1e9) == {1, 3}


def test_what_was_sampled_lately_or_runs_stays():
    versions = kept(keep=1)
    add(versions, 1, 2, 3, 4)
    versions.begin(version(1), 50.0)
    versions.begin(version(2), 50.0)
    versions.end(version(2), 90.0)
    assert outdated(versions, 150.0) == {3}
    assert outdated(versions, 191.0) == {2, 3}
    versions.end(version(1), 1000.0)
    assert outdated(versions, 1100.0) == {2, 3}
    assert outdated(versions, 1101.0) == {1, 2, 3}
    _, why = versions.outdated(1101.0)[-1]
    assert "the newest 1 are kept (service.keep_versions)" in why
    assert "the last 100 s (service.keep_sampled_s); these were not sampled for 101 s" in why


def test_bytes_take_the_longest_unused_and_leave_the_newest_of_each_model_and_what_runs():
    versions = kept(keep=8, most=60)
    add(versions, 1, 2, 3)
    add(versions, 1, 2, model="s:train:1")
    assert room_for(versions, 10) == []
    assert room_for(versions, 20) == [1]
    versions.begin(version(1), 1.0)
    assert room_for(versions, 20) == [2]
    assert room_for(versions, 30) == [2, 1]
    with pytest.raises(QuotaExceeded, match=r"40 bytes beside the 50 .* at most 60 together \(quota.version_bytes\)"):
        room_for(versions, 40)
    versions.end(version(1), 2.0)
    assert room_for(versions, 40) == [2, 1, 1]
    assert room_for(versions, 60, owner="bob") == []
    with pytest.raises(QuotaExceeded):
        room_for(versions, 61, owner="bob")


def test_what_is_gone_leaves_nothing_behind():
    versions = kept(keep=1, most=100)
    add(versions, 1, 2, 3)
    add(versions, 2)
    assert versions.of_base("b") == (3, 30)
    assert versions.of_session("s") == [version(1), version(2), version(3)]
    for number in (2, 2, 1, 3):
        versions.begin(version(number), 0.0)
        versions.remove(version(number))
        versions.end(version(number), 0.0)
    empty = kept()
    for name, value in vars(versions).items():
        assert name == "_limits" or value == getattr(empty, name), name


def test_looking_costs_what_is_found():
    """A loop that saves each second keeps hundreds for having been sampled lately; none of them is looked at."""
    versions = kept(sampled_s=1e6)
    for number in range(3000):
        add(versions, number, now=float(number))
    looked = 0

    class Counted(dict):  # type: ignore[type-arg]
        def values(self):  # type: ignore[no-untyped-def]
            nonlocal looked
            for value in super().values():
                looked += 1
                yield value

    versions._of_model["s:train:0"] = Counted(versions._of_model["s:train:0"])
    assert versions.outdated(3000.0) == []
    assert looked == 1
    assert len(versions.outdated(1e6 + 10.5)) == 11
    assert looked == 1 + 12
