from __future__ import annotations

import itertools

from descant.seeds import derive_seed


def test_no_two_places_share_a_seed():
    seeds = [
        derive_seed(root, purpose, replica=replica, step=step)
        for root, purpose, replica, step in itertools.product(
            range(4), ("dropout", "shuffle", "sample"), range(16), range(500)
        )
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_what_is_left_out_is_shared_and_order_does_not_matter():
    assert derive_seed(1, "shuffle", step=3) == derive_seed(1, "shuffle", step=3)
    assert derive_seed(1, "x", a=1, b=2) == derive_seed(1, "x", b=2, a=1)


def test_neighbours_do_not_run_together():
    """Joining parts without separators would make these equal."""
    assert derive_seed(1, "x", a=11) != derive_seed(11, "x", a=1)
    assert derive_seed(1, "x", a=1, b=2) != derive_seed(1, "x", a=2, b=1)
    assert derive_seed(1, "xa", b=1) != derive_seed(1, "x", ab=1)
    assert derive_seed(1, "x", a=1) != derive_seed(1, "x", a="1")


def test_the_seeds_of_a_run_stay_what_they_are():
    """A resumed run draws what the interrupted one would have."""
    assert derive_seed(0, "dropout", replica=0) == 927001349251772182
