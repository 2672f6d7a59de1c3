"""``descant doctor``: what every replica of a server does, and how the last one that failed did.

A live server is asked over HTTP (``ServerReport``); without one, its data directory still has the last failure
(``LastFailure``, in ``last-failure.json``), and a directory of several ranks has the coordinator's ``failure.json``.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from descant.ckpt.disk import REAL
from descant.distributed.failure import DistributedFailure, read_report
from descant.errors import ServerError, UserError
from descant.ranks.health import Death, Health, SlowTurn, TurnReport

FAILURE_FILE = "last-failure.json"
ROUTE = "/api/v1/admin/report"
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LastFailure:
    """A death, of whom (``who``) and when (``at``, seconds since the epoch)."""

    at: float
    who: str
    death: Death

    def to_json(self) -> dict[str, Any]:
        failure = self.death.failure
        return {
            "at": self.at,
            "who": self.who,
            "message": self.death.message,
            "last_lines": self.death.last_lines,
            "failure": None if failure is None else failure.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LastFailure:
        failure = value["failure"]
        death = Death(
            message=value["message"],
            last_lines=value["last_lines"],
            failure=None if failure is None else DistributedFailure.from_json(failure),
        )
        return cls(at=value["at"], who=value["who"], death=death)

    def write(self, path: Path) -> None:
        """Over an older one; durable before it returns. Raises ``OSError``."""
        partial = path.with_suffix(".partial")
        with open(partial, "w", encoding="utf-8", opener=_private) as file:  # it has lines that ranks have printed
            json.dump(self.to_json(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        REAL.fsync_directory(path.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """``turns``: None where it could not say. ``last_failure``: since the server was started."""

    name: str
    health: Health
    turns: TurnReport | None
    last_failure: LastFailure | None

    def without_last_lines(self) -> ReplicaReport:
        failure = self.last_failure
        if failure is None:
            return self
        return replace(self, last_failure=replace(failure, death=replace(failure.death, last_lines="")))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    """What a server says of its replicas. ``turn_timeout_s``: after that a turn is ended. ``storage``: why its data
    directory takes nothing new, None where it does. ``replayed_losses_differ``: commands that came out otherwise when
    they were repeated after a death, since the server started."""

    turn_timeout_s: float
    replicas: Sequence[ReplicaReport]
    storage: str | None = None
    replayed_losses_differ: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "turn_timeout_s": self.turn_timeout_s,
            "storage": self.storage,
            "replayed_losses_differ": self.replayed_losses_differ,
            "replicas": [
                {
                    "name": replica.name,
                    "health": asdict(replica.health),
                    "turns": None if replica.turns is None else asdict(replica.turns),
                    "last_failure": None if replica.last_failure is None else replica.last_failure.to_json(),
                }
                for replica in self.replicas
            ],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ServerReport:
        replicas = [
            ReplicaReport(
                name=replica["name"],
                health=Health(**replica["health"]),
                turns=None if replica["turns"] is None else TurnReport.from_json(replica["turns"]),
                last_failure=None
                if replica["last_failure"] is None
                else LastFailure.from_json(replica["last_failure"]),
            )
            for replica in value["replicas"]
        ]
        return cls(
            turn_timeout_s=value["turn_timeout_s"],
            replicas=replicas,
            storage=value["storage"],
            replayed_losses_differ=value["replayed_losses_differ"],
        )

    def wrong(self) -> list[str]:
        """What the operator should look at, in sentences. A failure that is over is not wrong."""
        found = [] if self.storage is None else [self.storage]
        if self.replayed_losses_differ:
            found.append(
                f"{self.replayed_losses_differ} commands came out otherwise when they were repeated after a death: "
                "their models are not quite what clients were told (the log names the commands)"
            )
        for replica in self.replicas:
            health = replica.health
            if health.state == "stopped":
                found.append(f"{replica.name} is stopped by a signal; SIGCONT lets its processes go on")
            elif health.state != "serving":
                found.append(f"{replica.name} is {health.state}")
            elif health.runs and health.runs_s > self.turn_timeout_s / 2:
                found.append(
                    f"{replica.name} has run one turn for {health.runs_s:.0f} s; "
                    f"it is ended after {self.turn_timeout_s:g} s"
                )
        return found


# --------------------------------------------------------------------------------------------------------------------
# The command


def ask(url: str, api_key: str) -> ServerReport:
    """A live server's. Raises ``UserError`` for a server that is not there or a key that it does not know."""
    request = urllib.request.Request(url.rstrip("/") + ROUTE, headers={"X-API-Key": api_key})
    # A proxy is for the world outside; a server is asked where it is.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return ServerReport.from_json(json.load(answer))
    except urllib.error.HTTPError as error:
        raise UserError(f"the server at {url} answered {error.code}: {_detail(error)}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(f"no server answers at {url}: {getattr(reason, 'strerror', None) or reason}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"what answers at {url} is no Descant server of this version") from None


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["detail"])
    except (OSError, ValueError, KeyError, TypeError):
        return error.reason


def last_failure_in(directory: Path) -> Sequence[str] | None:
    """The lines about the last failure that a directory knows of. Raises ``UserError`` for what cannot be read."""
    if not directory.is_dir():
        raise UserError(f"there is no directory {directory}")
    try:
        if (path := directory / FAILURE_FILE).exists():
            return list(_of_failure(LastFailure.from_json(json.loads(path.read_text(encoding="utf-8")))))
        if (path := directory / "failure.json").exists():
            return read_report(str(path)).report().splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no report of a failure: {error}") from None
    return None


def lines_of(report: ServerReport) -> Iterator[str]:
    for replica in report.replicas:
        health = replica.health
        yield f"{replica.name}: {health.state} on {health.device}"
        for rank, (pid, node) in enumerate(zip(health.pids, health.nodes, strict=True)):
            yield f"  rank {rank}: process {pid}" + (f" on {node}" if node else "")
        if health.state == "serving":
            yield f"  runs {health.runs}, for {health.runs_s:.0f} s" if health.runs else "  idle"
            yield f"  open requests: {health.num_commands} commands, {health.num_sample_requests} sample requests"
        if replica.turns is not None and replica.turns.num_turns:
            yield from (f"  {line}" for line in _of_turns(replica.turns))
        if replica.last_failure is not None:
            yield from (f"  {line}" for line in _of_failure(replica.last_failure))


def _of_turns(report: TurnReport) -> Iterator[str]:
    yield f"last {report.num_turns} turns, in {report.seconds:.0f} s; the slowest:"
    yield from (f"  {_of_turn(turn)}, {turn.ago_s:.0f} s ago" for turn in report.slowest)
    if not report.num_gaps:
        return
    shown = [f"{_seconds(s)}" for s in (report.gap_p50_s, report.gap_p99_s, report.gap_p99_9_s)]
    yield f"sampling waited {report.num_gaps} times: p50 {shown[0]}, p99 {shown[1]}, p99.9 {shown[2]}; the longest:"
    for gap in report.gaps:
        between = _parts({phase: s for phase, s in gap.before.items() if s >= _SHOWN * gap.seconds})
        yield f"  {_seconds(gap.seconds)}, {gap.ago_s:.0f} s ago" + (f"; at its end {between}" if between else "")
        yield from (f"    {_of_turn(turn)}" for turn in gap.turns)


_SHOWN = 0.01
"""Of a turn: what took less is not printed."""


def _of_turn(turn: SlowTurn) -> str:
    """``train, 8 datums, 512 tokens: 0.412 s (run 0.409 s; on a core 0.380 s; of it gc 0.120 s)``"""
    what = {"train": "datums", "rows": "commands"}.get(turn.kind, "sequences")
    tokens = f", {turn.tokens} tokens" if turn.tokens else ""
    phases = _parts({phase: s for phase, s in turn.phases.items() if phase != "wait" and s >= _SHOWN * turn.seconds})
    paused = _parts({kind: s for kind, s in turn.pauses.items() if s >= _SHOWN * turn.seconds})
    inside = "; of it ".join(filter(None, [f"{phases}; on a core {_seconds(turn.cpu_s)}", paused]))
    return f"{turn.kind}, {turn.sequences} {what}{tokens}: {_seconds(turn.seconds)} ({inside})"


def _parts(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_seconds(s)}" for name, s in seconds.items() if s > 0)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.0f} s"


def _of_failure(failure: LastFailure) -> Iterator[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.at))
    yield f"last failure, {when}: {failure.death.message}"
    if failure.death.failure is not None:
        yield from (f"  {line}" for line in failure.death.failure.report().splitlines())
    if failure.death.last_lines:
        yield "  its last lines:"
        yield from (f"    {line}" for line in failure.death.last_lines.splitlines())


def run_doctor(*, url: str, data_dir: Path | None, api_key: str) -> int:
    """Prints; 0 if nothing is wrong. ``data_dir`` None: asks the server at ``url``."""
    if data_dir is not None:
        lines = last_failure_in(data_dir)
        print("\n".join(lines) if lines else f"no failure is recorded in {data_dir}")
        return 1 if lines else 0
    report = ask(url, api_key)
    print("\n".join(lines_of(report)))
    wrong = report.wrong()
    print("\n".join(f"wrong: {sentence}" for sentence in wrong) if wrong else "nothing is wrong")
    return 1 if wrong else 0
