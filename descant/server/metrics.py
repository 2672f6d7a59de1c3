"""A server's numbers in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
        "saves_written",
        "saves_failed",
        "save_bytes",
        "save_staged_seconds",
        "save_written_seconds",
        "writer_restarts",
        "adapter_offloads",
        "adapter_loads",
        "adapter_prefetches",
        "adapter_load_wait_seconds",
        "loop_train_seconds",
        "loop_rows_seconds",
        "loop_sample_seconds",
        "loop_idle_seconds",
        "pause_gc_seconds",
        "pause_trim_seconds",
        "pause_build_seconds",
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

HISTOGRAMS = ("sampling_gap_seconds", "sample_turn_seconds", "train_turn_seconds", "rows_turn_seconds")
"""Each is several numbers: ``…_bucket/`` the upper end of each bucket, ``…_sum`` and ``…_count``."""


def exposition(numbers: Mapping[str, Mapping[str, float]]) -> str:
    """``numbers``: by base, then by name. Every metric once, with its type and a line for each base that has it, and
    of a histogram the lines for each of its numbers."""
    names = dict.fromkeys(name for of_base in numbers.values() for name in of_base)  # buckets stay in order
    lines = []
    for metric, own in sorted(_by_metric(names).items()):
        kind = "histogram" if metric in HISTOGRAMS else "counter" if own[0] in COUNTERS else "gauge"
        lines.append(f"# TYPE {PREFIX}{metric} {kind}")
        for base, of_base in numbers.items():
            for name in own:
                if name in of_base:
                    line, _, bound = (metric if kind == "counter" else name).partition("/")
                    le = f',le="{bound}"' if bound else ""
                    lines.append(f'{PREFIX}{line}{{base="{_escaped(base)}"{le}}} {of_base[name]:.15g}')
    return "".join(f"{line}\n" for line in lines)


def _by_metric(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of each metric's numbers: one, but of a histogram all of them."""
    found: dict[str, list[str]] = {}
    for name in names:
        histogram = next(
            (own for own in HISTOGRAMS if name.startswith((f"{own}_bucket/", f"{own}_sum", f"{own}_count"))), None
        )
        found.setdefault(histogram or (f"{name}_total" if name in COUNTERS else name), []).append(name)
    return found


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
