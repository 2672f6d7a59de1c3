"""What the doctor says of reports, of directories and of servers that are none."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from descant.cli import main
from descant.distributed.failure import DistributedFailure, RankRow, write_report
from descant.doctor import FAILURE_FILE, LastFailure, ReplicaReport, ServerReport, last_failure_in, lines_of
from descant.ranks.health import Death, Gap, Health, SlowTurn, TurnReport

HEALTH = Health(
    state="serving",
    pids=(12, 34),
    nodes=("", "node-b"),
    device="cuda",
    runs="a training pass of 2 datums",
    runs_s=3.4,
    num_commands=5,
    num_sample_requests=2,
)
DISTRIBUTED_FAILURE = DistributedFailure(
    failed_ranks=[1],
    where="turn[7]/commit",
    cause="it was killed by SIGKILL",
    table=[RankRow(rank=0, state="running", where="at turn[7]/commit", since_s=0.2, last=("all_reduce [4]",))],
)
FAILURE = LastFailure(
    at=0.0,
    who="m",
    death=Death(
        message="rank 1 of m was killed by SIGKILL", last_lines="one line\nanother", failure=DISTRIBUTED_FAILURE
    ),
)
TURN = SlowTurn(
    kind="train",
    seconds=1.25,
    cpu_s=0.75,
    ago_s=8.0,
    sequences=4,
    tokens=512,
    phases={"wait": 3.0, "take": 0.25, "run": 1.0, "answer": 0.0001},
    pauses={"gc": 0.5, "trim": 0.0},
)
TURNS = TurnReport(
    num_turns=90,
    seconds=61.0,
    num_gaps=40,
    gap_p50_s=0.012,
    gap_p99_s=0.5,
    gap_p99_9_s=1.5,
    gaps=[Gap(seconds=1.5, ago_s=6.0, turns=[TURN], before={"take": 0.25, "decide": 0.0})],
    slowest=[TURN],
)
REPORT = ServerReport(
    turn_timeout_s=900.0, replicas=[ReplicaReport(name="m", health=HEALTH, turns=TURNS, last_failure=FAILURE)]
)


def test_a_report_arrives_as_it_was_sent() -> None:
    arrived = ServerReport.from_json(json.loads(json.dumps(REPORT.to_json())))
    assert json.dumps(arrived.to_json()) == json.dumps(REPORT.to_json())
    assert list(lines_of(arrived)) == list(lines_of(REPORT))


def test_a_report_is_printed_whole() -> None:
    text = "\n".join(lines_of(REPORT))
    for part in (
        "m: serving on cuda",
        "  rank 0: process 12\n  rank 1: process 34 on node-b\n",
        "  runs a training pass of 2 datums, for 3 s",
        "5 commands, 2 sample requests",
        "  last 90 turns, in 61 s; the slowest:\n"
        "    train, 4 datums, 512 tokens: 1.250 s (take 0.250 s, run 1.000 s; on a core 0.750 s; of it gc 0.500 s)"
        ", 8 s ago\n",
        "  sampling waited 40 times: p50 0.012 s, p99 0.500 s, p99.9 1.500 s; the longest:\n"
        "    1.500 s, 6 s ago; at its end take 0.250 s\n"
        "      train, 4 datums, 512 tokens: 1.250 s (",
        ": rank 1 of m was killed by SIGKILL\n",
        "rank 1 failed at turn[7]/commit: it was killed by SIGKILL",
        "rank 0: running, at turn[7]/commit, since 0.2 s\n",
        "all_reduce [4]",
        "    one line\n",
    ):
        assert part in text
    idle = replace(REPORT, replicas=[replace(REPORT.replicas[0], health=replace(HEALTH, runs=""))])
    assert "  idle\n" in "\n".join(lines_of(idle))


@pytest.mark.parametrize(
    ("health", "wrong"),
    [
        pytest.param(HEALTH, [], id="a failure that is over"),
        pytest.param(replace(HEALTH, state="down", pids=(), nodes=()), ["m is down"], id="down"),
        pytest.param(replace(HEALTH, state="starting"), ["m is starting"], id="starting"),
        pytest.param(
            replace(HEALTH, runs_s=451.0), ["m has run one turn for 451 s; it is ended after 900 s"], id="a long turn"
        ),
        pytest.param(replace(HEALTH, runs="", runs_s=451.0), [], id="idle for long"),
    ],
)
def test_what_is_wrong(health: Health, wrong: list[str]) -> None:
    assert replace(REPORT, replicas=[replace(REPORT.replicas[0], health=health)]).wrong() == wrong


def test_a_replay_that_came_out_otherwise_is_wrong() -> None:
    [sentence] = replace(REPORT, replayed_losses_differ=2).wrong()
    assert sentence.startswith("2 commands came out otherwise when they were repeated after a death")


def test_what_ranks_printed_stays_on_the_machine() -> None:
    [replica] = REPORT.replicas
    assert replica.without_last_lines().last_failure == replace(FAILURE, death=replace(FAILURE.death, last_lines=""))
    assert replace(replica, last_failure=None).without_last_lines().last_failure is None


# --------------------------------------------------------------------------------------------------------- a directory


def doctor(*args: str, **env: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["doctor", *args], env=env, catch_exceptions=False)
    return done.exit_code, done.output


def test_the_last_failure_of_a_data_directory(tmp_path: Path) -> None:
    assert doctor("--data-dir", str(tmp_path)) == (0, f"no failure is recorded in {tmp_path}\n")
    replace(FAILURE, death=Death(message="an older one")).write(tmp_path / FAILURE_FILE)
    FAILURE.write(tmp_path / FAILURE_FILE)
    code, text = doctor("--data-dir", str(tmp_path))
    assert code == 1
    assert "rank 1 failed at turn[7]/commit" in text
    assert "another" in text
    assert [path.name for path in tmp_path.iterdir()] == [FAILURE_FILE]


def test_the_failure_in_a_directory_of_a_run(tmp_path: Path) -> None:
    write_report(str(tmp_path / "failure.json"), DISTRIBUTED_FAILURE)
    assert last_failure_in(tmp_path) == DISTRIBUTED_FAILURE.report().splitlines()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"at": 0, "who": "m", "message": "x"}'])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FAILURE_FILE).write_text(text)
    code, said = doctor("--data-dir", str(tmp_path))
    assert code == 2
    assert f"{tmp_path / FAILURE_FILE} is no report of a failure" in said


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert doctor("--data-dir", str(tmp_path / "no")) == (2, f"descant: there is no directory {tmp_path / 'no'}\n")


# ------------------------------------------------------------------------------------------------------------ a server


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_server_that_is_well_and_one_that_is_not() -> None:
    with answering(200, json.dumps(REPORT.to_json()).encode()) as url:
        code, text = doctor("--url", url, HTTP_PROXY="http://127.0.0.1:9")
        assert (code, text.splitlines()[-1]) == (0, "nothing is wrong")
        assert doctor(TINKER_BASE_URL=url)[0] == 0
    ill = replace(REPORT, replicas=[replace(REPORT.replicas[0], health=replace(HEALTH, state="starting"))])
    with answering(200, json.dumps(ill.to_json()).encode()) as url:
        code, text = doctor("--url", url)
        assert (code, text.splitlines()[-1]) == (1, "wrong: m is starting")


@pytest.mark.parametrize(
    ("status", "body", "code", "says"),
    [
        (401, b'{"detail": "the API key is not known here"}', 2, "answered 401: the API key is not known here"),
        (404, b"nothing", 2, "answered 404: Not Found"),
        (200, b"<html>", 2, "is no Descant server of this version"),
        (200, b"{}", 2, "is no Descant server of this version"),
    ],
)
def test_a_server_that_does_not_say(status: int, body: bytes, code: int, says: str) -> None:
    with answering(status, body) as url:
        got, text = doctor("--url", url)
        assert got == code
        assert says in text


def test_no_server() -> None:
    code, text = doctor("--url", "http://127.0.0.1:9")
    assert code == 1
    assert text == "descant: no server answers at http://127.0.0.1:9: Connection refused\n"


def test_one_or_the_other(tmp_path: Path) -> None:
    code, text = doctor("--url", "http://127.0.0.1:9", "--data-dir", str(tmp_path))
    assert code == 2
    assert "give one of them" in text
