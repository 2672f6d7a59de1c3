"""Published versions whose rows say which they are."""

from __future__ import annotations

from descant.adapters.bank import AdapterBank
from descant.types import Lora, Version


def publish(bank: AdapterBank, number: int, *, rank: int) -> Version:
    """A row that is its number everywhere (exact in bfloat16 up to 256). Number 0 comes first."""
    if number == 0:
        bank.create("m", Lora(rank=rank))
    bank.weights("m").fill_(number)
    bank.refresh_compute("m")
    version = Version(model_id="m", number=number)
    bank.publish("m", version)
    return version


def is_whole(bank: AdapterBank, version: Version) -> bool:
    row = bank.pin_version(version)
    found = bank.compute_slab(row.rank_bucket)[row.slot].clone()
    bank.unpin_version(version)
    return bool((found == version.number).all())
