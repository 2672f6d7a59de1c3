"""Rows, versions and their tiers, and PEFT's names."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from descant.adapters.bank import AdapterBank
from descant.adapters.layout import RANK_BUCKETS, Layout, LoraSite, rank_bucket_of
from descant.adapters.offload import SpillDirectory
from descant.adapters.slots import SLOTS_AT_ONCE
from descant.errors import CannotStore, NotFound, ServerError, UserError
from descant.types import Lora, Version

SITES = (
    LoraSite(name="model.layers.0.self_attn.q_proj", group="attn", in_features=12, out_features=20),
    LoraSite(name="model.layers.0.mlp.up_proj", group="mlp", in_features=12, out_features=36),
    LoraSite(name="lm_head", group="unembed", in_features=12, out_features=50),
)
CPU = torch.device("cpu")


def make_bank(dtype: torch.dtype = torch.float32, *, spill: Path | None = None, **limits: int) -> AdapterBank:
    files = None if spill is None else SpillDirectory(spill)
    return AdapterBank(SITES, device=CPU, dtype=dtype, spill=files, **limits)


def fill(bank: AdapterBank, model_id: str, value: float) -> None:
    lora = bank[model_id].lora
    parts = {name: torch.full_like(part, value) for name, part in bank.export(bank.weights(model_id), lora).items()}
    bank.import_row(parts, lora, bank.weights(model_id))
    bank.refresh_compute(model_id)


def work(bank: AdapterBank, version: Version) -> torch.Tensor:
    row = bank.pin_version(version)
    bank.unpin_version(version)
    return bank.compute_slab(row.rank_bucket)[row.slot].clone()


def row_bytes(rank_bucket: int = 8, item: int = 4) -> int:
    return Layout.of(SITES, rank_bucket).row * item


# ---- layout


@pytest.mark.parametrize("rank_bucket", RANK_BUCKETS)
def test_rows_and_offsets_are_aligned_and_disjoint(rank_bucket: int) -> None:
    layout = Layout.of(SITES, rank_bucket)
    pieces = []
    for site, a, b in zip(SITES, layout.a_offset, layout.b_offset, strict=True):
        pieces += [(a, a + rank_bucket * site.in_features), (b, b + rank_bucket * site.out_features)]
    assert all(start % 64 == 0 for start, _ in pieces)
    assert all(end <= start for (_, end), (start, _) in pairwise(pieces))
    assert layout.row % 64 == 0
    assert layout.row >= pieces[-1][1]
    for dtype in (torch.bfloat16, torch.float32):
        bank = make_bank(dtype)
        bank.create("m", Lora(rank=rank_bucket))
        for slab in (bank.compute_slab(rank_bucket), bank.gradient_slab(rank_bucket)):
            assert slab.stride(0) * slab.element_size() % 128 == 0
            assert slab.data_ptr() % 128 == 0
            assert slab.storage_offset() == 0  # the products count their offsets from the storage's start


def test_a_site_begins_after_as_many_features_in_every_class() -> None:
    """By which a kernel finds it, whatever the class. No site here is a multiple of 8 wide."""
    layouts = [Layout.of(SITES, rank_bucket) for rank_bucket in RANK_BUCKETS]
    found = {tuple(at / layout.rank_bucket for at in (*layout.a_offset, *layout.b_offset)) for layout in layouts}
    assert found == {(0, 40, 96, 16, 56, 112)}


@pytest.mark.parametrize(("rank", "expected"), [(1, 8), (8, 8), (9, 16), (17, 32), (65, 128), (129, 256), (256, 256)])
def test_rank_bucket(rank: int, expected: int) -> None:
    assert rank_bucket_of(rank) == expected


@pytest.mark.parametrize("rank", [0, -1, 257])
def test_ranks_out_of_range_are_refused(rank: int) -> None:
    bank = make_bank()
    with pytest.raises(UserError, match=f"rank is {rank}, expected 1 to 256"):
        bank.create("m", Lora(rank=rank))
    assert bank.stats()["adapters"] == 0


# ---- adapters


def test_seeds() -> None:
    bank = make_bank()
    for model_id, seed in [("a", 7), ("b", 7), ("c", 8), ("zero", 0), ("minus", -1), ("x", None), ("y", None)]:
        bank.create(model_id, Lora(rank=5, seed=seed))
    assert torch.equal(bank.weights("a"), bank.weights("b"))
    rows = [bank.weights(m) for m in ("a", "c", "zero", "minus", "x", "y")]
    assert all(not torch.equal(rows[i], rows[j]) for i in range(len(rows)) for j in range(i))
    again = make_bank()
    again.create("x", Lora(rank=5))
    assert torch.equal(again.weights("x"), bank.weights("x"))


def test_a_seed_means_the_same_in_every_rank_bucket_and_with_every_flag() -> None:
    bank = make_bank()
    bank.create("r5", Lora(rank=5, seed=3))
    bank.create("r9", Lora(rank=9, seed=3))
    bank.create("head", Lora(rank=5, seed=3, train_attn=False, train_mlp=False))
    small, large, head = (bank.export(bank.weights(m), bank[m].lora) for m in ("r5", "r9", "head"))
    for name, part in small.items():
        if "lora_A" in name:
            assert torch.equal(part, large[name][:5])
    assert head.keys() == {"base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"}
    assert all(torch.equal(part, small[name]) for name, part in head.items())


def test_a_new_adapter_is_kaiming_a_and_zero_b() -> None:
    bank = make_bank(torch.bfloat16)
    bank.create("m", Lora(rank=200, seed=1))
    for name, part in bank.export(bank.weights("m"), bank["m"].lora).items():
        if "lora_B" in name:
            assert part.count_nonzero() == 0
        else:
            assert part.abs().max() <= 12**-0.5
            assert abs(part.std().item() - (3 * 12) ** -0.5) < 0.02
            assert abs(part.mean().item()) < 0.02
    adapter = bank["m"]
    assert adapter.gradient_free
    assert adapter.step == 0
    assert torch.equal(bank.compute_slab(256)[adapter.compute_slot], bank.weights("m").bfloat16())
    assert bank.gradient("m").count_nonzero() == 0
    assert all(moment.count_nonzero() == 0 for moment in bank.moments("m"))


def test_a_slot_is_clean_for_its_next_owner() -> None:
    bank = make_bank()
    first = bank.create("a", Lora(rank=8, seed=1))
    for row in (bank.weights("a"), bank.gradient("a"), *bank.moments("a")):
        row.fill_(float("nan"))
    bank.refresh_compute("a")
    slots = (first.gradient_slot, first.compute_slot)
    bank.delete("a")
    bank.delete("a")
    with pytest.raises(NotFound):
        _ = first.gradient_slot
    with pytest.raises(NotFound):
        bank["a"]
    second = bank.create("b", Lora(rank=3, seed=2))
    assert slots == (second.gradient_slot, second.compute_slot)
    fresh = make_bank()
    fresh.create("b", Lora(rank=3, seed=2))
    assert torch.equal(bank.weights("b"), fresh.weights("b"))
    assert bank.gradient("b").count_nonzero() == 0
    assert all(moment.count_nonzero() == 0 for moment in bank.moments("b"))
    assert torch.equal(bank.compute_slab(8)[second.compute_slot], fresh.compute_slab(8)[fresh["b"].compute_slot])


def test_one_model_has_one_adapter() -> None:
    bank = make_bank()
    bank.create("a", Lora())
    with pytest.raises(ServerError, match="model a has an adapter already"):
        bank.create("a", Lora())


def test_flags_that_train_nothing_are_refused() -> None:
    bank = AdapterBank(SITES[:1], device=CPU, dtype=torch.float32)
    with pytest.raises(UserError, match="trains nothing on this base model"):
        bank.create("a", Lora(train_attn=False))
    bank.create("a", Lora())


def test_growth_keeps_every_row() -> None:
    bank, version = make_bank(), Version(model_id="m0", number=1)
    for index in range(101):
        bank.create(f"m{index}", Lora(rank=8, seed=index))
        fill(bank, f"m{index}", index + 1)
        bank.gradient(f"m{index}").fill_(-index)
        for moment, value in zip(bank.moments(f"m{index}"), (10 + index, 20 + index), strict=True):
            moment.fill_(value)
        if index == 0:
            bank.publish("m0", version)
    assert bank.compute_slab(8).shape[0] > SLOTS_AT_ONCE
    for index in range(101):
        adapter = bank[f"m{index}"]
        assert bank.weights(f"m{index}").max() == index + 1
        assert bank.compute_slab(8)[adapter.compute_slot].max() == index + 1
        assert (bank.gradient(f"m{index}") == -index).all()
        assert (bank.moments(f"m{index}")[0] == 10 + index).all()
        assert (bank.moments(f"m{index}")[1] == 20 + index).all()
    assert work(bank, version).max() == 1
    assert len({bank[f"m{i}"].gradient_slot for i in range(101)}) == 101


def test_scratch_rows_are_zero_and_belong_to_nobody() -> None:
    bank = make_bank()
    taken = []
    for index in range(40):
        adapter = bank.create(f"m{index}", Lora(rank=8))
        assert bank.gradient(f"m{index}").count_nonzero() == 0
        scratch = bank.allocate_scratch(8)
        assert bank.gradient_row(8, scratch).count_nonzero() == 0
        bank.gradient(f"m{index}").fill_(1.0)
        bank.gradient_row(8, scratch).fill_(2.0)
        taken += [adapter.gradient_slot, scratch]
    assert len(set(taken)) == 80
    assert bank.stats()["scratch_rows"] == 40
    bank.gradient_row(8, taken[1]).fill_(float("nan"))
    bank.free_scratch(8, taken[1])
    slots = [bank.allocate_scratch(8) for _ in range(100)]
    assert taken[1] in slots
    assert all(bank.gradient_row(8, slot).count_nonzero() == 0 for slot in slots)


def test_views_share_no_version_counter() -> None:
    bank = make_bank()
    first, second = bank.create("a", Lora(rank=8)), bank.create("b", Lora(rank=8))
    factors = [
        bank.compute_slab(8)[first.compute_slot],
        bank.gradient_slab(8)[first.gradient_slot],
        bank.gradient("a"),
        bank.weights("a"),
        *bank.moments("a"),
    ]
    x = torch.ones(1, requires_grad=True)
    y = sum((x * factor).sum() for factor in factors)
    for row in (bank.weights("b"), bank.gradient("b"), *bank.moments("b"), bank.compute_slab(8)[second.compute_slot]):
        row.fill_(2.0)
    bank.refresh_compute("b")
    bank.delete("b")
    assert isinstance(y, torch.Tensor)
    y.backward()


# ---- versions


def test_a_published_version_does_not_change() -> None:
    bank, version = make_bank(torch.bfloat16), Version(model_id="a", number=3)
    bank.create("a", Lora(rank=8))
    fill(bank, "a", 1.5)
    bank.publish("a", version)
    fill(bank, "a", 2.5)
    bank.publish("a", version)  # a second time: the first one stands
    bank.publish("a", Version(model_id="a", number=4))
    assert work(bank, version).max() == 1.5
    assert work(bank, Version(model_id="a", number=4)).max() == 2.5
    bank.delete("a")
    bank.create("b", Lora(rank=8))
    fill(bank, "b", 9.0)
    assert work(bank, version).max() == 1.5
    row = bank.pin_version(version)
    assert bank.lora(row).rank == 8


def test_unknown_versions() -> None:
    bank, version = make_bank(), Version(model_id="a", number=1)
    assert not bank.has_version(version)
    with pytest.raises(NotFound, match="version 1 of model a"):
        bank.pin_version(version)
    bank.release(version)
    with pytest.raises(NotFound):
        bank.publish("a", version)
    with pytest.raises(ServerError, match="not pinned"):
        bank.unpin_version(version)


def publish_many(bank: AdapterBank, count: int) -> list[Version]:
    bank.create("a", Lora(rank=8))
    versions = [Version(model_id="a", number=n) for n in range(count)]
    for version in versions:
        fill(bank, "a", version.number + 1)
        bank.publish("a", version)
    return versions


def test_the_coldest_go_to_host_then_to_disk_and_come_back(tmp_path: Path) -> None:
    bank = make_bank(version_bytes=2 * row_bytes(), host_bytes=3 * row_bytes(), spill=tmp_path)
    versions = publish_many(bank, 9)
    bank.residency.settle()
    stats = bank.stats()
    assert (stats["versions_resident"], stats["versions_host"], stats["versions_disk"]) == (2, 3, 4)
    assert len(list(tmp_path.iterdir())) == 4
    for version in [*versions, *reversed(versions)]:
        assert work(bank, version).max() == version.number + 1
        bank.residency.settle()
        stats = bank.stats()
        assert stats["versions_resident"] <= 2
        assert stats["versions_host"] <= 3
        assert stats["versions_resident_bytes"] <= 2 * row_bytes()
    assert bank.stats()["compute_rows"] == 3, "evicted rows are used again"
    for version in versions:
        bank.release(version)
    bank.residency.settle()
    stats = bank.stats()
    assert (stats["versions_resident"], stats["versions_host"], stats["versions_disk"]) == (0, 0, 0)
    assert list(tmp_path.iterdir()) == []
    assert stats["compute_rows"] == 1


def test_recently_used_versions_stay() -> None:
    bank = make_bank(version_bytes=2 * row_bytes())
    first, second = publish_many(bank, 2)
    bank.pin_version(first)
    bank.unpin_version(first)
    fill(bank, "a", 50)
    bank.publish("a", Version(model_id="a", number=50))
    assert bank.stats()["versions_resident"] == 2
    before = bank.compute_slab(8).clone()
    row = bank.pin_version(first)  # was kept: nothing moves
    assert torch.equal(bank.compute_slab(8), before)
    assert before[row.slot].max() == 1
    assert work(bank, second).max() == 2


def test_pinned_versions_stay_beyond_the_limit_and_go_when_unpinned() -> None:
    bank = make_bank(version_bytes=2 * row_bytes())
    versions = publish_many(bank, 5)
    rows = [bank.pin_version(version) for version in versions]
    again = bank.pin_version(versions[0])
    assert again == rows[0]
    fill(bank, "a", 99)
    bank.publish("a", Version(model_id="a", number=99))
    assert len({row.slot for row in rows}) == 5
    for version, row in zip(versions, rows, strict=True):
        assert bank.compute_slab(8)[row.slot].max() == version.number + 1
    assert bank.stats()["versions_pinned"] == 5
    bank.unpin_version(versions[0])
    assert bank.stats()["versions_pinned"] == 5
    for version in versions:
        bank.unpin_version(version)
    stats = bank.stats()
    assert (stats["versions_pinned"], stats["versions_resident"], stats["versions_host"]) == (0, 2, 4)
    assert work(bank, Version(model_id="a", number=99)).max() == 99


def test_a_released_version_is_served_to_who_has_it_pinned() -> None:
    bank = make_bank()
    (version,) = publish_many(bank, 1)
    row = bank.pin_version(version)
    bank.release(version)
    bank.release(version)
    assert not bank.has_version(version)
    with pytest.raises(NotFound):
        bank.pin_version(version)
    fill(bank, "a", 70)
    bank.publish("a", Version(model_id="a", number=70))
    assert bank.compute_slab(8)[row.slot].max() == 1
    bank.unpin_version(version)
    assert bank.stats()["compute_rows"] == 2
    with pytest.raises(ServerError):
        bank.lora(row)


def test_without_a_directory_versions_stay_on_the_host() -> None:
    bank = make_bank(version_bytes=row_bytes(), host_bytes=row_bytes())
    versions = publish_many(bank, 5)
    assert bank.stats()["versions_host"] == 4
    assert all(work(bank, version).max() == version.number + 1 for version in versions)


def test_a_disk_that_fails_loses_nothing(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    bank = make_bank(version_bytes=row_bytes(), host_bytes=0, spill=spill)
    spill.rmdir()
    [version] = publish_many(bank, 1)
    with pytest.raises(CannotStore, match="the data directory cannot be written"):
        bank.publish("a", Version(model_id="a", number=7))
    assert work(bank, version).max() == version.number + 1
    spill.mkdir()
    bank.publish("a", Version(model_id="a", number=7))
    assert work(bank, version).max() == version.number + 1


def test_a_spilled_file_that_is_gone_or_broken_is_named(tmp_path: Path) -> None:
    bank = make_bank(version_bytes=0, host_bytes=0, spill=tmp_path)
    first, second = publish_many(bank, 2)
    bank.residency.settle()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    files[0].unlink()
    files[1].write_bytes(b"rubbish")
    for version in (first, second):
        with pytest.raises(ServerError, match=f"version {version.number} of model a cannot be read back"):
            bank.pin_version(version)
    assert bank.stats()["compute_rows"] == 1


def test_left_over_files_of_an_earlier_process_go_and_nothing_else(tmp_path: Path) -> None:
    bank = make_bank(version_bytes=0, host_bytes=0, spill=tmp_path)
    publish_many(bank, 3)
    bank.residency.settle()
    (tmp_path / "mine.txt").write_text("x")
    (tmp_path / "half.version.partial").write_bytes(b"x")
    make_bank(spill=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_published_from_a_checkpoint_equals_published_from_training() -> None:
    bank, lora = make_bank(torch.bfloat16), Lora(rank=5, train_mlp=False)
    bank.create("a", lora)
    bank.weights("a").copy_(torch.randn_like(bank.weights("a")))
    parts = bank.export(bank.weights("a"), lora)
    bank.import_row(parts, lora, bank.weights("a"))
    bank.refresh_compute("a")
    bank.publish("a", Version(model_id="a", number=1))
    other = Version(model_id="old", number=1)
    bank.publish_tensors(other, lora, parts)
    bank.publish_tensors(other, lora, {})
    assert torch.equal(work(bank, other), work(bank, Version(model_id="a", number=1)))
    assert bank.lora(bank.pin_version(other)) == lora
    with pytest.raises(UserError, match="the checkpoint lacks"):
        bank.publish_tensors(Version(model_id="old", number=2), lora, {})
    assert not bank.has_version(Version(model_id="old", number=2))


# ---- PEFT's names


FLAG_SETS = [
    (attn, mlp, unembed)
    for attn in (True, False)
    for mlp in (True, False)
    for unembed in (True, False)
    if attn or mlp or unembed
]


@pytest.mark.parametrize(("attn", "mlp", "unembed"), FLAG_SETS)
@pytest.mark.parametrize("rank", [1, 8, 13])
def test_export_and_import_are_a_round_trip(rank: int, attn: bool, mlp: bool, unembed: bool) -> None:
    bank, lora = make_bank(), Lora(rank=rank, train_attn=attn, train_mlp=mlp, train_unembed=unembed)
    bank.create("a", lora)
    parts = bank.export(bank.weights("a"), lora)
    wanted = {site.name: (site.in_features, site.out_features) for site in SITES}
    names = {
        "model.layers.0.self_attn.q_proj": attn,
        "model.layers.0.mlp.up_proj": mlp,
        "lm_head": unembed,
    }
    assert parts.keys() == {
        f"base_model.model.{name}.lora_{half}.weight" for name, on in names.items() if on for half in "AB"
    }
    random = {name: torch.randn_like(part) for name, part in parts.items()}
    row = torch.full_like(bank.weights("a"), float("nan"))
    bank.import_row(random, lora, row)
    back = bank.export(row, lora)
    for name, part in back.items():
        site = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        features = wanted[site[0]]
        assert part.shape == ((rank, features[0]) if site[1] == "A" else (features[1], rank))
        assert part.is_contiguous()
        assert torch.equal(part, random[name])
        part.fill_(0.0)
    assert row.count_nonzero() == sum(part.numel() for part in random.values())


def test_import_refuses_what_does_not_fit_and_changes_nothing() -> None:
    bank, lora = make_bank(), Lora(rank=8)
    bank.create("a", lora)
    parts = bank.export(bank.weights("a"), lora)
    before, name = bank.weights("a").clone(), "base_model.model.lm_head.lora_A.weight"
    cases = [
        ({k: v for k, v in parts.items() if k != name}, f"lacks {name}"),
        ({**parts, "base_model.model.x.lora_A.weight": parts[name]}, r"has base_model\.model\.x\.lora_A\.weight"),
        ({**parts, name: parts[name][:4]}, rf"{name} has shape \(4, 12\), expected \(8, 12\)"),
    ]
    for tensors, message in cases:
        with pytest.raises(UserError, match=message):
            bank.import_row(tensors, lora, bank.weights("a"))
        assert torch.equal(bank.weights("a"), before)
    with pytest.raises(ServerError, match="a row of rank bucket 8 has shape"):
        bank.export(torch.zeros(3), lora)
