"""A server's numbers in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "descant_"

COUNTERS = frozenset(
    [
        "sample_preemptions",
        "sample_prefilled_tokens",
        "sample_hit_tokens",
        "sample_mid_sequence_updates",
        "sample_drafted_steps",
        "sample_drafted_tokens",
        "sample_accepted_tokens",
        "adapter_offloads",
        "adapter_loads",
        "adapter_prefetches",
        "adapter_load_wait_seconds",
        "loop_train_seconds",
        "loop_rows_seconds",
        "loop_sample_seconds",
        "loop_idle_seconds",
        "version_offloads",
        "version_loads",
        "version_load_wait_seconds",
        "offload_writes",
        "offload_written_bytes",
        "offload_write_seconds",
        "offload_wait_seconds",
        "models_recovered",
        "commands_replayed",
        "replayed_losses_differ",
        "snapshots_taken",
    ]
)
"""Numbers that only grow while their replicas live; a counter's name ends with ``_total``. All others are gauges."""


def exposition(numbers: Mapping[str, Mapping[str, float]]) -> str:
    """``numbers``: by base, then by name. Every metric once, with its type and a line for each base that has it."""
    lines = []
    for name in sorted({name for of_base in numbers.values() for name in of_base}):
        counter = name in COUNTERS
        metric = f"{PREFIX}{name}_total" if counter else PREFIX + name
        lines.append(f"# TYPE {metric} {'counter' if counter else 'gauge'}")
        lines += [
            f'{metric}{{base="{_escaped(base)}"}} {of_base[name]:.15g}'
            for base, of_base in numbers.items()
            if name in of_base
        ]
    return "".join(f"{line}\n" for line in lines)


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
