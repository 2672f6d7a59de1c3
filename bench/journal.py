"""What the journal adds to a command, and how long a recovery takes.

    python bench/journal.py                 # the price: futures with and without their command, in turns
    python bench/journal.py --recovery 8    # so many tenants on a tiny model, whose rank is killed

The price is that of the database's commits on this machine's disk: medians of ``--rounds`` commands, each once with its
command and once without, one after the other and 16 at a time. A recovery is timed from the moment when the rank serves
again, which is the time of its start; the start itself is told beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import tinker

from descant.service.clock import SystemClock
from descant.service.database import Database
from descant.service.future_store import SqlFutureStore
from descant.service.journal import Journal
from descant.testing.crash import END_S, KEY, CrashingServer, Diary, batch, take_step
from descant.testing.tiny import tiny_model
from descant.types import CommandRecord, Encoded, FutureKey, RequestBody

SIZES = (0, 4 << 10, 32 << 10, 128 << 10, 1 << 20)
"""Bodies' bytes: an optimiser step, small and large backwards, the largest that lies in the database, and a file."""

ANSWER = Encoded(content_type="application/x-protobuf", body=bytes(2000))


async def price(directory: Path, rounds: int) -> None:
    database = await Database.open(directory / "bench.db")
    store, journal = SqlFutureStore(database, SystemClock()), await Journal.open(database, directory / "journal")
    seq_ids = iter(range(1, 1 << 40))

    async def command(body: bytes | None) -> float:
        """Milliseconds until it is acknowledged and answered."""
        key = FutureKey(kind="train", scope="m", seq_id=next(seq_ids))
        record = None
        if body is not None:
            sent = RequestBody(data=body) if body else None
            record = CommandRecord(
                model_id="m", seq_id=key.seq_id, operation="forward_backward", body=sent, num_bytes=len(body)
            )
        began = time.perf_counter()
        if record is not None:
            record = await journal.with_file(record)
        request_id, _ = await store.put(key=key, owner="o", base="b", operation="x", command=record)
        await store.resolve(request_id, ANSWER, loss=1.0)
        return 1e3 * (time.perf_counter() - began)

    print(f"{'bytes':>8} {'at once':>8} {'without':>9} {'with':>9} {'adds':>8}   ms a command, medians")
    for num_bytes in SIZES:
        body = random.Random(num_bytes).randbytes(num_bytes)
        for at_once in (1, 16):
            without: list[float] = []
            with_journal: list[float] = []
            for _ in range(max(1, rounds // at_once)):
                for times, given in ((without, None), (with_journal, body)):
                    times += await asyncio.gather(*(command(given) for _ in range(at_once)))
            medians = statistics.median(without), statistics.median(with_journal)
            print(
                f"{num_bytes:8} {at_once:8} {medians[0]:9.2f} {medians[1]:9.2f} {medians[1] - medians[0]:8.2f}",
                flush=True,
            )
    await database.close()


def recovery(directory: Path, tenants: int, steps: int) -> None:
    os.environ["TINKER_TELEMETRY"] = "0"
    model = tiny_model("llama", directory / "llama")
    server = CrashingServer(model, directory, snapshots=False)
    try:
        server.start()
        server.wait_until_ready()
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        clients = [service.create_lora_training_client(str(model), rank=8, seed=n) for n in range(tenants)]
        trainings = [client.result(timeout=END_S) for client in clients]
        chance = np.random.default_rng(0)
        diary = Diary(0)
        began = time.perf_counter()
        for _ in range(steps):
            for training in trainings:
                take_step(training, diary, chance, 0)
        trained_s = time.perf_counter() - began
        killed = time.perf_counter()
        server.kill_rank(random.Random(0))
        while server.metrics().get("descant_models_recovering", 0.0) == 0.0 and time.perf_counter() - killed < 5.0:
            time.sleep(0.01)
        server.wait_until_ready()
        serves = time.perf_counter()
        waiting = [training.forward(batch(chance), "cross_entropy") for training in trainings]
        for one in waiting:
            one.result(timeout=END_S)
        ended = time.perf_counter()
        repeated = server.metrics()["descant_commands_replayed_total"]
        print(
            f"{tenants} tenants, {steps} steps each in {trained_s:.1f} s: the rank serves again after "
            f"{serves - killed:.1f} s, all have answers {ended - serves:.2f} s later, {repeated:.0f} commands repeated"
        )
    finally:
        server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--recovery", type=int, metavar="TENANTS", help="time a recovery instead")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--directory", type=Path, help="on the disk that is to be measured")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        if given.recovery:
            recovery(Path(directory), given.recovery, given.steps)
        else:
            asyncio.run(price(Path(directory), given.rounds))


if __name__ == "__main__":
    main()
