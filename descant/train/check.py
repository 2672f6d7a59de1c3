"""Everything about a training request that can be refused before a pass. numpy only: the fake trainer checks alike.

A refusal is one ``UserError`` sentence that says where, got and expected; the first problem found is the one reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from descant.errors import UserError
from descant.types import LOSS_FN_INPUTS, AdamParams, Datum, ForwardBackward, ModelFacts, input_length

LOSS_FN_CONFIG: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004},
}
"""What ``loss_fn_config`` may set, with the defaults. The thresholds are bounds of the ratio exp(p - q), not epsilons
around 1. No default of ``beta`` is documented; 0.05 is the value of the documentation's example. gspo's are the ranges
of its paper, 3e-4 below and 4e-4 above 1: a mean over a sequence stays far nearer to 1 than a token's ratio."""

NOT_SERVED = ("stable_reinforce", "custom")
"""Losses that the SDK can name and that have no public definition, or that run an uploaded graph."""

IGNORED_TARGET = -100
"""What torch's cross_entropy and the libraries on it leave out as a target."""

OPTIONAL_INPUTS = frozenset({"weights"})


def check_forward_backward(command: ForwardBackward, facts: ModelFacts) -> None:
    """Raises ``UserError`` for anything in the request that would not compute. Fields are looked at datum by datum:
    what one datum leaves out another may have."""
    _check_loss_fn(command.loss_fn)
    loss_fn_config(command)
    if not command.data:
        raise UserError("data is empty, expected at least one datum")
    for index, datum in enumerate(command.data):
        _check_model_input(f"data[{index}].model_input", datum, facts)
        _check_loss_fn_inputs(f"data[{index}].loss_fn_inputs", datum, command.loss_fn, facts)


def loss_fn_config(command: ForwardBackward) -> dict[str, float]:
    """``command.loss_fn_config`` with the defaults filled in. Raises ``UserError``."""
    config = dict(LOSS_FN_CONFIG[command.loss_fn])
    for key, value in command.loss_fn_config.items():
        if key not in config:
            takes = f"takes {_names(config)}" if config else "takes none"
            raise UserError(f"loss_fn_config has unexpected {key!r}; loss_fn {command.loss_fn!r} {takes}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise UserError(f"loss_fn_config[{key!r}] is {value!r}, expected a finite number of at least 0")
        config[key] = float(value)
    if "clip_low_threshold" in config and config["clip_low_threshold"] > config["clip_high_threshold"]:
        raise UserError(
            f"loss_fn_config['clip_low_threshold'] is {config['clip_low_threshold']:g}, expected at most "
            f"clip_high_threshold, which is {config['clip_high_threshold']:g} (both are bounds of the ratio, near 1)"
        )
    return config


def dense_inputs(datum: Datum, loss_fn: str) -> dict[str, np.ndarray]:
    """A checked datum's arrays in the dtypes that losses compute with: ``target_tokens`` int64, the others float32 of
    its shape, ``weights`` ones where left out."""
    targets = np.asarray(datum.loss_fn_inputs["target_tokens"]).astype(np.int64, copy=False)
    dense: dict[str, np.ndarray] = {"target_tokens": targets}
    for name in LOSS_FN_INPUTS[loss_fn][1:]:
        array = datum.loss_fn_inputs.get(name)
        dense[name] = np.ones(targets.shape, np.float32) if array is None else _float32(np.asarray(array))
    return dense


def check_adam(params: AdamParams) -> None:
    """Raises ``UserError`` naming the parameter. Zero is a value: rate 0, beta 0, decay 0, and norm 0 (no clipping)."""
    for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
        value = getattr(params, name)
        if not math.isfinite(value) or value < 0:
            raise UserError(f"adam_params.{name} is {value!r}, expected a finite number of at least 0")
    for name in ("beta1", "beta2"):
        value = getattr(params, name)
        if not 0 <= value < 1:  # false for NaN as well
            raise UserError(f"adam_params.{name} is {value!r}, expected at least 0 and below 1")
    # float32 is what it is added in: a smaller one is 0 there, and a weight without gradient would become 0 / 0
    if not float(np.finfo(np.float32).tiny) <= params.eps < math.inf:
        raise UserError(f"adam_params.eps is {params.eps!r}, expected a finite number of at least 1.2e-38")


def _check_loss_fn(loss_fn: str) -> None:
    if loss_fn == "stable_reinforce":
        raise UserError(
            f"loss_fn {loss_fn!r} has no public definition, expected one of {_names(LOSS_FN_INPUTS)}; whoever runs the "
            "server may say what it is computed as (descant serve --set losses.stable_reinforce=importance_sampling)"
        )
    if loss_fn in NOT_SERVED:
        raise UserError(f"loss_fn {loss_fn!r} is not served, expected one of {_names(LOSS_FN_INPUTS)}")
    if loss_fn not in LOSS_FN_INPUTS:
        raise UserError(f"loss_fn is {loss_fn!r}, expected one of {_names(LOSS_FN_INPUTS)}")


def _check_model_input(where: str, datum: Datum, facts: ModelFacts) -> None:
    length = input_length(datum.model_input)
    if length == 0:
        raise UserError(f"{where} is empty, expected at least one token")
    if length > facts.max_context_length:
        raise UserError(
            f"{where} has {length} tokens, expected at most {facts.max_context_length} (the context of {facts.name})"
        )
    for number, chunk in enumerate(datum.model_input):
        _check_token_ids(f"{where}.chunks[{number}].tokens", chunk.tokens, facts.vocab_size)


def _check_loss_fn_inputs(where: str, datum: Datum, loss_fn: str, facts: ModelFacts) -> None:
    names = LOSS_FN_INPUTS[loss_fn]
    for name in datum.loss_fn_inputs:
        if name not in names:
            raise UserError(f"{where} has unexpected {name!r}; loss_fn {loss_fn!r} takes {_names(names)}")
    for name in names:
        if name not in datum.loss_fn_inputs and name not in OPTIONAL_INPUTS:
            raise UserError(f"{where} has no {name!r}; loss_fn {loss_fn!r} takes {_names(names)}")

    length = input_length(datum.model_input)
    targets = np.asarray(datum.loss_fn_inputs["target_tokens"])
    at_targets = f"{where}['target_tokens']"
    if loss_fn == "cross_entropy" and targets.ndim == 2:
        if targets.shape[0] != length or targets.shape[1] == 0:
            raise UserError(f"{at_targets} has shape {targets.shape}, expected ({length},) or ({length}, K)")
    elif targets.shape != (length,):
        raise UserError(f"{at_targets} has shape {targets.shape}, expected ({length},)")
    _check_token_ids(at_targets, targets, facts.vocab_size, hint=_ignored(loss_fn))

    for name in names[1:]:
        if name not in datum.loss_fn_inputs:
            continue
        array = np.asarray(datum.loss_fn_inputs[name])
        at = f"{where}[{name!r}]"
        if array.shape != targets.shape:
            raise UserError(f"{at} has shape {array.shape}, expected {targets.shape}")
        if array.dtype.kind not in "fiub":
            raise UserError(f"{at} has dtype {array.dtype}, expected float32")
        finite = np.isfinite(_float32(array))
        if not finite.all():
            position = _first(~finite)
            raise UserError(f"{at} is {float(array[position])} at {_place(position)}, expected finite float32 numbers")
        if name == "sequence_ratio_mask" and not (is_mask := (array == 0) | (array == 1)).all():
            position = _first(~is_mask)
            raise UserError(f"{at} is {float(array[position]):g} at {_place(position)}, expected 0 or 1")


def _check_token_ids(where: str, tokens: np.ndarray, vocab_size: int, hint: str = "") -> None:
    """``hint``: what to say of ``IGNORED_TARGET``."""
    if tokens.dtype.kind not in "iu":
        raise UserError(f"{where} has dtype {tokens.dtype}, expected integers")
    wrong = (tokens < 0) | (tokens >= vocab_size)
    if wrong.any():
        position = _first(wrong)
        token_id = int(tokens[position])
        raise UserError(
            f"{where} has token id {token_id} at {_place(position)}, expected 0 to {vocab_size - 1}"
            + (hint if token_id == IGNORED_TARGET else "")
        )


def _ignored(loss_fn: str) -> str:
    if loss_fn == "dro":
        return ""  # its quadratic term is there at every position
    name = "weight" if loss_fn == "cross_entropy" else "advantage"
    return f"; to leave a position out, give it {name} 0 and any valid id as its target"


def _float32(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # beyond float32 becomes inf, which is then refused as such
        return array.astype(np.float32, copy=False)


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(int(axis) for axis in np.unravel_index(int(np.argmax(wrong)), wrong.shape))


def _place(position: tuple[int, ...]) -> str:
    return f"position {position[0]}" if len(position) == 1 else f"position {position}"


def _names(names: Mapping[str, object] | tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names)
