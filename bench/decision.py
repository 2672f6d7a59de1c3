"""What choosing a turn costs a rank's thread while many models wait: the queues beside the plain reference.

    python bench/decision.py [--models 64 256 1000] [--rounds 30]

A decode step: the choice and the order in which adapters are asked for, while each model waits with a request
("training"), with an optimiser step ("rows") or for a checkpoint ("reading"); also where a command came since the last
one, so that the order is made anew. A training turn: choice, order, and what it took is taken out of the queues. Both
sides alternate in one process; ``value`` and ``baseline`` are medians in milliseconds of the queues and of the
reference (``descant.testing.reference_queues``), which looks at all models that wait before every turn. Adapters answer
from a dictionary: what the bank makes of the order is not in it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from descant.ranks.decide import ROWS, SAMPLE, TRAIN
from descant.ranks.queues import Entry, Queues
from descant.testing.reference_queues import ReferenceQueues
from descant.testing.trainer import datum
from descant.types import AdamParams, CheckpointSource, Command, ForwardBackward, LoadState, OptimStep

TURN_TOKENS = 16384
DATUM_TOKENS = 1024
SOURCE = CheckpointSource(uri="a checkpoint", directory="/a", optimizer=False)
SIDES = (Queues, ReferenceQueues)


class Memory:
    adapter_bytes = 10**12

    def __init__(self, names: list[str]):
        self._resident = dict.fromkeys(names[::2])

    def bytes_in_use(self, model_id: str) -> tuple[int, int]:
        return 100, 40

    def is_resident(self, model_id: str) -> bool:
        return model_id in self._resident


def entry(what: str, model_id: str, seq_id: int) -> Entry:
    command: Command
    match what:
        case "rows":
            command = OptimStep(model_id=model_id, seq_id=seq_id, adam_params=AdamParams())
        case "reading":
            command = LoadState(model_id=model_id, seq_id=seq_id, source=SOURCE)
            return Entry(id=0, command=command, arrived_s=0.0, reading=Future())
        case _:
            data = (datum(np.full(DATUM_TOKENS, seq_id % 100 + 1)),)
            command = ForwardBackward(model_id=model_id, seq_id=seq_id, data=data, loss_fn="cross_entropy")
    made = Entry(id=0, command=command, arrived_s=0.0)
    if what == "training":
        made.data(1, None)  # looked at once, on arrival or before the next turn
    return made


def with_waiting(side: type[Queues] | type[ReferenceQueues], what: str, names: list[str]) -> Queues | ReferenceQueues:
    queues = side(
        Memory(names),
        num_ranks=1,
        microbatch_tokens=TURN_TOKENS,
        piece_tokens=None,
        packable=True,
        shares={TRAIN: 1.0, SAMPLE: 1.0},
        max_pass_s=math.inf,
    )
    for name in names:
        queues.add(entry(what, name, 1))
    return queues


def milliseconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return 1000 * (time.perf_counter() - began)


def decode_step(queues: Queues | ReferenceQueues) -> float:
    queues.ran(TRAIN, 1.0)  # a step is due ...
    queues.ran(ROWS, 1.0)  # ... and rows are not

    def turn() -> None:
        choice = queues.choose({SAMPLE: 1})
        assert choice.kind == SAMPLE
        queues.prefetch_order(choice)
        queues.ran(choice.kind, 0.1)

    return milliseconds(turn)


def decode_step_after_arrival(queues: Queues | ReferenceQueues) -> float:
    newcomer = entry("rows", "newcomer", 1)
    queues.add(newcomer)
    value = decode_step(queues)
    queues.end(newcomer.key)
    return value


def training_turn(queues: Queues | ReferenceQueues) -> float:
    """Whoever had it comes again."""
    taken = list[tuple[str, int]]()

    def turn() -> None:
        choice = queues.choose({})
        assert choice.kind == TRAIN
        queues.prefetch_order(choice)
        for key in queues.take(choice, 0.0).closes:
            queues.end(key)
            taken.append(key)
        queues.ran(choice.kind, 1.0)

    value = milliseconds(turn)
    for model_id, seq_id in taken:
        queues.add(entry("training", model_id, seq_id + 1))
    return value


def row(name: str, what: str, num_models: int, turn: Callable[[Queues | ReferenceQueues], float], rounds: int) -> dict:
    names = [f"model-{number:04}" for number in range(num_models)]
    sides = [with_waiting(side, what, names) for side in SIDES]
    if what == "training":
        for queues in sides:
            training_turn(queues)
    values = [[turn(queues) for queues in sides] for _ in range(rounds)]
    value, baseline = (statistics.median(of_side) for of_side in zip(*values, strict=True))
    return {
        "id": name,
        "what": f"{num_models} models wait: {what}",
        "value": value,
        "unit": "ms",
        "baseline": baseline,
        "ratio": value / baseline,
        "least": min(of_queues for of_queues, _ in values),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for num_models in options.models:
        for what in ("training", "rows", "reading"):
            rows.append(row("decode_step", what, num_models, decode_step, options.rounds))
        rows.append(row("after_arrival", "training", num_models, decode_step_after_arrival, options.rounds))
        rows.append(row("training_turn", "training", num_models, training_turn, options.rounds))
    for of_turn in rows:
        print(
            f"{of_turn['id']:14} {of_turn['what']:32} {of_turn['value']:8.3f} ms, was {of_turn['baseline']:8.3f} ms "
            f"(ratio {of_turn['ratio']:.3f}; at best {of_turn['least']:.3f} ms)"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
