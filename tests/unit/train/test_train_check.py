"""Every refusal names where, got and expected; every zero that means something passes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from descant.errors import UserError
from descant.train.check import check_adam, check_forward_backward, dense_inputs, loss_fn_config
from descant.types import AdamParams, Datum, EncodedText, ForwardBackward, ModelFacts

FACTS = ModelFacts(
    name="tiny",
    architecture="X",
    vocab_size=10,
    max_context_length=8,
    eos_token_ids=(),
    num_params=1,
    dtype="float32",
    device="cpu",
)


def datum(length: int = 2, **inputs: object) -> Datum:
    tokens = np.arange(length, dtype=np.int32)
    arrays = {"target_tokens": np.arange(length), **inputs}
    return Datum(
        model_input=(EncodedText(tokens=tokens),),
        loss_fn_inputs={name: np.asarray(value) for name, value in arrays.items() if value is not None},
    )


def rl(length: int = 2, **inputs: object) -> Datum:
    zeros = np.zeros(length, np.float32)
    return datum(length, **{"logprobs": zeros, "advantages": zeros, **inputs})


def command(*data: Datum, loss_fn: str = "cross_entropy", **config: float | str) -> ForwardBackward:
    return ForwardBackward(model_id="m", seq_id=1, data=data, loss_fn=loss_fn, loss_fn_config=config)


GOOD = datum(weights=[1.0, 0.0])

REFUSED = {
    "no data": (command(), "data is empty, expected at least one datum"),
    "unknown loss": (command(GOOD, loss_fn="mse"), "loss_fn is 'mse', expected one of 'cross_entropy', "),
    "gspo without a mask": (
        command(rl(), loss_fn="gspo"),
        "data[0].loss_fn_inputs has no 'sequence_ratio_mask'; loss_fn 'gspo' takes 'target_tokens', 'logprobs', ",
    ),
    "mask between": (
        command(rl(sequence_ratio_mask=[1.0, 0.5]), loss_fn="gspo"),
        "data[0].loss_fn_inputs['sequence_ratio_mask'] is 0.5 at position 1, expected 0 or 1",
    ),
    "mask longer": (
        command(rl(sequence_ratio_mask=[1, 1, 1]), loss_fn="gspo"),
        "data[0].loss_fn_inputs['sequence_ratio_mask'] has shape (3,), expected (2,)",
    ),
    "stable_reinforce": (
        command(GOOD, loss_fn="stable_reinforce"),
        "loss_fn 'stable_reinforce' has no public definition, expected one of 'cross_entropy', 'importance_sampling', "
        "'ppo', 'cispo', 'dro', 'gspo'; whoever runs the server may say what it is computed as (descant serve --set "
        "losses.stable_reinforce=importance_sampling)",
    ),
    "custom": (command(GOOD, loss_fn="custom"), "loss_fn 'custom' is not served"),
    "unknown config": (
        command(GOOD, beta=1.0),
        "loss_fn_config has unexpected 'beta'; loss_fn 'cross_entropy' takes none",
    ),
    "epsilon": (
        command(rl(), loss_fn="ppo", epsilon=0.2),
        "loss_fn_config has unexpected 'epsilon'; loss_fn 'ppo' takes 'clip_low_threshold', 'clip_high_threshold'",
    ),
    "thresholds crossed": (
        command(rl(), loss_fn="ppo", clip_high_threshold=0.2),
        "loss_fn_config['clip_low_threshold'] is 0.8, expected at most clip_high_threshold, which is 0.2",
    ),
    "threshold text": (
        command(rl(), loss_fn="cispo", clip_low_threshold="a"),
        "loss_fn_config['clip_low_threshold'] is 'a', expected a finite number of at least 0",
    ),
    "threshold nan": (command(rl(), loss_fn="cispo", clip_low_threshold=math.nan), "is nan, expected a finite number"),
    "beta negative": (command(rl(), loss_fn="dro", beta=-1.0), "loss_fn_config['beta'] is -1.0, expected a finite"),
    "empty datum": (command(GOOD, datum(0)), "data[1].model_input is empty, expected at least one token"),
    "no chunks": (command(replace(GOOD, model_input=())), "data[0].model_input is empty, expected at least one token"),
    "too long": (command(datum(9)), "data[0].model_input has 9 tokens, expected at most 8 (the context of tiny)"),
    "input id": (
        command(replace(GOOD, model_input=(EncodedText(tokens=np.array([0, 10], np.int32)),))),
        "data[0].model_input.chunks[0].tokens has token id 10 at position 1, expected 0 to 9",
    ),
    "negative id": (
        command(replace(GOOD, model_input=(EncodedText(tokens=np.array([-1, 0], np.int32)),))),
        "has token id -1 at position 0, expected 0 to 9",
    ),
    "target id": (
        command(GOOD, datum(target_tokens=[3, 10])),
        "data[1].loss_fn_inputs['target_tokens'] has token id 10 at position 1, expected 0 to 9",
    ),
    "target id in [N,K]": (
        command(datum(target_tokens=[[3, 4], [5, -7]])),
        "data[0].loss_fn_inputs['target_tokens'] has token id -7 at position (1, 1), expected 0 to 9",
    ),
    "target that torch ignores": (
        command(datum(target_tokens=[3, -100])),
        "data[0].loss_fn_inputs['target_tokens'] has token id -100 at position 1, expected 0 to 9; to leave a position "
        "out, give it weight 0 and any valid id as its target",
    ),
    "target that torch ignores, in RL": (
        command(rl(target_tokens=[-100, 1]), loss_fn="ppo"),
        "at position 0, expected 0 to 9; to leave a position out, give it advantage 0 and any valid id as its target",
    ),
    "huge target id": (
        command(datum(target_tokens=np.array([2**64 - 1, 0], np.uint64))),
        "has token id 18446744073709551615",
    ),
    "float targets": (
        command(datum(target_tokens=[1.0, 2.0])),
        "data[0].loss_fn_inputs['target_tokens'] has dtype float64, expected integers",
    ),
    "targets longer": (
        command(datum(target_tokens=[1, 2, 3])),
        "data[0].loss_fn_inputs['target_tokens'] has shape (3,), expected (2,)",
    ),
    "weights longer": (
        command(GOOD, GOOD, GOOD, datum(weights=[1.0, 1.0, 1.0])),
        "data[3].loss_fn_inputs['weights'] has shape (3,), expected (2,)",
    ),
    "weights of [N,K]": (
        command(datum(target_tokens=[[3, 4], [5, 6]], weights=[1.0, 1.0])),
        "data[0].loss_fn_inputs['weights'] has shape (2,), expected (2, 2)",
    ),
    "[N,0]": (
        command(datum(target_tokens=np.zeros((2, 0), np.int64))),
        "data[0].loss_fn_inputs['target_tokens'] has shape (2, 0), expected (2,) or (2, K)",
    ),
    "[N,K] for ppo": (
        command(rl(target_tokens=[[1], [2]]), loss_fn="ppo"),
        "data[0].loss_fn_inputs['target_tokens'] has shape (2, 1), expected (2,)",
    ),
    "no targets": (
        command(datum(target_tokens=None)),
        "data[0].loss_fn_inputs has no 'target_tokens'; loss_fn 'cross_entropy' takes 'target_tokens', 'weights'",
    ),
    "no advantages": (
        command(rl(), rl(advantages=None), loss_fn="importance_sampling"),
        "data[1].loss_fn_inputs has no 'advantages'; loss_fn 'importance_sampling' takes 'target_tokens', 'logprobs', ",
    ),
    "mask": (
        command(rl(mask=[1, 1]), loss_fn="cispo"),
        "data[0].loss_fn_inputs has unexpected 'mask'; loss_fn 'cispo' takes 'target_tokens', 'logprobs', 'advantages'",
    ),
    "thresholds in a datum": (
        command(rl(clip_low_threshold=[0.8, 0.8]), loss_fn="ppo"),
        "data[0].loss_fn_inputs has unexpected 'clip_low_threshold'",
    ),
    "nan weight": (
        command(datum(weights=[0.0, math.nan])),
        "data[0].loss_fn_inputs['weights'] is nan at position 1, expected finite float32 numbers",
    ),
    "infinite advantage": (
        command(rl(advantages=[math.inf, 0.0]), loss_fn="ppo"),
        "data[0].loss_fn_inputs['advantages'] is inf at position 0",
    ),
    "beyond float32": (
        command(rl(logprobs=np.array([0.0, -1e39])), loss_fn="ppo"),
        "data[0].loss_fn_inputs['logprobs'] is -1e+39 at position 1, expected finite float32 numbers",
    ),
    "text weights": (
        command(datum(weights=["a", "b"])),
        "data[0].loss_fn_inputs['weights'] has dtype <U1, expected float32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    request, message = REFUSED[case]
    with pytest.raises(UserError) as error:
        check_forward_backward(request, FACTS)
    assert message in str(error.value)


SERVED = {
    "plain": command(GOOD),
    "without weights": command(datum()),
    "fields differ by datum": command(datum(), GOOD),
    "[N,K]": command(datum(target_tokens=[[1, 2], [3, 4]], weights=[[1, 0], [0, 1]])),
    "as long as the context": command(datum(8)),
    "negative weights": command(datum(weights=[-3.5, 0.0])),
    "integer advantages": command(rl(advantages=[0, 1]), loss_fn="importance_sampling"),
    "int32 targets": command(datum(target_tokens=np.array([1, 2], np.int32))),
    "thresholds at 0 and far": command(rl(), loss_fn="cispo", clip_low_threshold=0, clip_high_threshold=1e9),
    "beta 0": command(rl(), loss_fn="dro", beta=0.0),
    "gspo": command(rl(sequence_ratio_mask=[False, True]), rl(sequence_ratio_mask=[0, 0]), loss_fn="gspo"),
    "two chunks": command(
        replace(GOOD, model_input=(EncodedText(tokens=np.array([1], np.int32)),) * 2),
    ),
}


@pytest.mark.parametrize("case", SERVED)
def test_served(case: str) -> None:
    check_forward_backward(SERVED[case], FACTS)


def test_dense_inputs_cast_and_fill() -> None:
    dense = dense_inputs(datum(target_tokens=np.array([1, 2], np.int32)), "cross_entropy")
    assert dense["target_tokens"].dtype == np.int64
    assert dense["weights"].dtype == np.float32
    assert dense["weights"].tolist() == [1.0, 1.0]
    dense = dense_inputs(rl(advantages=[0, 1], logprobs=np.array([-1.0, -2.0])), "ppo")
    assert [dense[name].dtype for name in ("logprobs", "advantages")] == [np.float32, np.float32]
    assert dense["advantages"].tolist() == [0.0, 1.0]
    assert set(dense) == {"target_tokens", "logprobs", "advantages"}


def test_config_fills_defaults() -> None:
    assert loss_fn_config(command(loss_fn="ppo", clip_high_threshold=1.3)) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 1.3,
    }
    assert loss_fn_config(command(loss_fn="dro")) == {"beta": 0.05}
    assert loss_fn_config(command(loss_fn="gspo")) == {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("learning_rate", "weight_decay", "grad_clip_norm")
            for value in (-1.0, math.nan, math.inf)
        ),
        *((name, value) for name in ("beta1", "beta2") for value in (-0.1, 1.0, math.nan)),
        *(("eps", value) for value in (0.0, -1.0, 1e-50, math.nan, math.inf)),
    ],
)
def test_adam_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"^adam_params\.{name} is .*, expected "):
        check_adam(replace(AdamParams(), **{name: value}))


def test_adam_zeros_are_values() -> None:
    check_adam(AdamParams())
    check_adam(AdamParams(learning_rate=0.0, beta1=0.0, beta2=0.0, weight_decay=0.0, grad_clip_norm=0.0))
    check_adam(AdamParams(learning_rate=1e30))
