"""Recipes of tinker-cookbook, unmodified, with the losses that they choose themselves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from cookbook import MODEL, run

from descant.testing.server import Server

pytestmark = pytest.mark.recipes

RECIPES = {
    "sl_loop": ("batch_size=4", "max_steps=2", "lora_rank=8"),
    "chat_sl.train": ("dataset=chats/chats.jsonl", "batch_size=4", "max_steps=2", "lora_rank=8"),
    "rl_loop": ("batch_size=2", "group_size=8", "max_steps=2", "max_tokens=24", "lora_rank=8"),
    "math_rl.train": ("env=arithmetic", "groups_per_batch=4", "group_size=8", "max_steps=2", "lora_rank=8"),
    "multiplayer_rl.guess_number.train": (
        "renderer_name=role_colon",
        "batch_size=1",
        "group_size=2",
        "max_steps=1",
        "max_tokens=4",
        "eval_every=0",
    ),
    "preference.shorter.train": (
        "renderer_name=role_colon",
        "batch_size=2",
        "group_size=4",
        "max_steps=1",
        "max_tokens=16",
        "eval_every=0",
    ),
}


ALL_ALIKE = {"multiplayer_rl.guess_number.train", "rl_loop"}
"""What a small model does there may be all equally wrong, so that there is nothing to reinforce: ``rl_loop`` takes no
step then."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_to_its_end(place: Path, server: Server, recipe: str) -> None:
    done = run(place, server, recipe, f"model_name={MODEL}", *RECIPES[recipe])
    assert done.code == 0, done.printed[-4000:]
    assert done.checkpoints, "it saved nothing"
    assert done.checkpoints[-1]["state_path"].startswith("tinker://")
    norms = [row["grad_norm:mean"] for row in done.metrics if "grad_norm:mean" in row]
    assert norms or recipe in ALL_ALIKE, "it took no step"
    assert all(0 <= norm < math.inf for norm in norms)
    assert recipe in ALL_ALIKE or any(norm > 0 for norm in norms)
