"""Ranks on the machines of a Ray cluster. Ray places them and starts their hosts (``ray_host``); all messages between
server and rank go over sockets of their own.

    cluster = await RayCluster.connect(settings, data_dir=...)
    [specs] = await cluster.specs([spec])   # one a GPU of the cluster; on CPUs as many as asked for
    replica = await Replica.start(specs[0], launch=cluster.start)
    …
    await cluster.close()                   # after the replicas: their room is given back

Each replica has a placement group, kept over restarts. Ray waits silently for room that there is not; here every wait
has the deadline ``placement_timeout_s``, and its error says what was asked for and what the cluster has.

Must be used on one event loop's thread. Calls of Ray block, and are made in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import descant
from descant.errors import ServerError, UserError
from descant.ranks.launch import Link, RankHandle, Receive, start_ranks
from descant.ranks.placement import RayNode, ray_resources, ray_specs
from descant.ranks.ray_host import HostConfig, RankHost
from descant.ranks.ray_rank import RayRank, first_sentence
from descant.ranks.settings import RankAssignment, RankSpec, RaySettings

T = TypeVar("T")

RAY_GRACE_S = 10.0
"""How long Ray may take beyond its own deadlines."""


class RayCluster:
    """Made by ``connect``."""

    def __init__(self, ray: Any, *, address: str, settings: RaySettings, data_dir: Path):
        self._ray = ray
        self._settings = settings
        self._probe = data_dir / "ray-probe"
        self._probe_text = secrets.token_hex(16)
        self._groups: dict[tuple[str, str | None], Any] = {}
        """By replica."""
        self.address = address
        """This machine, as the others reach it."""

    @classmethod
    async def connect(cls, settings: RaySettings, *, data_dir: Path) -> RayCluster:
        """Raises ``UserError`` where Ray is not installed or there is no cluster at ``settings.address``."""
        assert settings.address is not None
        if settings.address != "auto":
            await asyncio.to_thread(_check_address, settings.address)
        # Read on import: a call after ``close`` fails, and does not join another cluster of this machine, or start one.
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
        try:
            import ray
        except ImportError:
            raise UserError("ray.address is set, and Ray is not installed here: pip install 'descant[ray]'") from None

        # It would log that the thread below is not the main one, and each worker's death, at length.
        logging.getLogger("ray").setLevel(logging.ERROR)

        def connect() -> str:
            ray.init(
                address=settings.address,
                namespace="descant",
                log_to_driver=False,
                configure_logging=False,
            )
            return str(ray.util.get_node_ip_address())

        deadline_s = settings.placement_timeout_s + RAY_GRACE_S
        try:
            address = await asyncio.wait_for(_in_thread(connect), deadline_s)
        except TimeoutError:
            raise UserError(
                f"ray.address is {settings.address!r}, and no Ray cluster answered there within {deadline_s:g} s"
            ) from None
        except Exception as error:
            raise UserError(f"cannot join the Ray cluster at {settings.address!r}: {first_sentence(error)}") from None
        cluster = cls(ray, address=address, settings=settings, data_dir=data_dir)
        try:
            await asyncio.to_thread(cluster._probe.write_text, cluster._probe_text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write into data_dir {data_dir}: {error.strerror}") from None
        return cluster

    async def nodes(self) -> tuple[RayNode, ...]:
        """Those that are alive."""
        return tuple(
            RayNode(
                name=node["NodeManagerAddress"],
                cpus=int(node["Resources"].get("CPU", 0)),
                gpus=int(node["Resources"].get("GPU", 0)),
            )
            for node in await self._call(self._ray.nodes)
            if node["Alive"]
        )

    async def specs(self, bases: Sequence[RankSpec]) -> Sequence[Sequence[RankSpec]]:
        """For each base one spec a replica. Raises ``UserError`` for replicas that cannot be."""
        return ray_specs(bases, nodes=await self.nodes())

    async def start(self, spec: RankSpec, receive: Receive) -> Link:
        """``Launcher``: the ranks of one replica; after a death, others in the same placement group."""
        group = await self._reserve(spec)
        ranks = [RayRank(name=_name(spec, number)) for number in range(spec.settings.parallel.data_parallel_size)]
        watched: set[str] = set()

        async def begin(assignment: RankAssignment, receive: Receive) -> RankHandle:
            rank = ranks[assignment.rank]
            rank.begin(replace(assignment, host=ranks[0].address), receive)
            if assignment.rendezvous is not None and rank.node_id not in {assignment.rendezvous.node, *watched}:
                watched.add(rank.node_id)
                rank.watch(assignment.rendezvous)
            return rank

        try:
            await _gather_all(self._connect(spec, group, number, rank) for number, rank in enumerate(ranks))
            return await start_ranks(spec, receive, begin, host=self.address)
        except BaseException:
            for rank in ranks:
                rank.close()
            raise

    async def close(self) -> None:
        """Gives all room back and leaves the cluster. What still runs on it ends."""

        def leave() -> None:
            for group in self._groups.values():
                with contextlib.suppress(Exception):
                    self._ray.util.remove_placement_group(group)
            self._ray.shutdown()

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_in_thread(leave), RAY_GRACE_S)
        with contextlib.suppress(OSError):
            self._probe.unlink()

    # ------------------------------------------------------------------------------------------------ for places
    async def _call(self, function: Callable[[], T]) -> T:
        """Raises ``ServerError`` when Ray does not answer, or fails."""
        try:
            return await asyncio.wait_for(_in_thread(function), self._settings.placement_timeout_s + RAY_GRACE_S)
        except TimeoutError:
            raise ServerError("the Ray cluster does not answer") from None
        except Exception as error:
            raise ServerError(f"the Ray cluster failed: {first_sentence(error)}") from error

    async def _reserve(self, spec: RankSpec) -> Any:
        """The replica's placement group, with a bundle for each rank, on as few nodes as possible; the one that its
        last ranks had, if that still has its room. Raises ``ServerError`` saying what was asked for and what there is.
        """
        ray, timeout_s, replica = self._ray, self._settings.placement_timeout_s, (spec.model, spec.label)

        def reserve() -> bool:
            if replica not in self._groups:
                bundles = [ray_resources(spec)] * spec.settings.parallel.data_parallel_size
                self._groups[replica] = ray.util.placement_group(bundles, strategy="PACK")
            return bool(self._groups[replica].wait(timeout_s))

        if await self._call(reserve):
            return self._groups[replica]
        error = await self._no_room(spec)
        group = self._groups.pop(replica)
        await self._call(lambda: ray.util.remove_placement_group(group))
        raise error

    async def _connect(self, spec: RankSpec, group: Any, number: int, rank: RayRank) -> None:
        """Starts a rank's host and waits until its process is there."""
        ray, resources = self._ray, ray_resources(spec)
        config = HostConfig(
            address=await rank.listen(self.address),
            token=rank.token,
            probe=(str(self._probe), self._probe_text),
            version=descant.__version__,
            env=spec.env,
        )

        def start_host() -> tuple[Any, Any]:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            host = ray.remote(RankHost).options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            )
            actor = host.remote()
            return actor, actor.run.remote(config)

        actor, run = await self._call(start_host)
        rank.set_host(asyncio.wrap_future(run.future()), end=lambda: _in_thread(lambda: ray.kill(actor)))
        await rank.connected(timeout_s=self._settings.placement_timeout_s)

    async def _no_room(self, spec: RankSpec) -> ServerError:
        nodes = await self.nodes()
        free = await self._call(self._ray.available_resources)
        has = ", ".join(f"{node.name}: {node.cpus} CPUs, {node.gpus} GPUs" for node in nodes[:8])
        more = f", and {len(nodes) - 8} more" if len(nodes) > 8 else ""
        wanted = " and ".join(
            f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in ray_resources(spec).items()
        )
        num_ranks = spec.settings.parallel.data_parallel_size
        what = f"{wanted} on one node" if num_ranks == 1 else f"{num_ranks} times {wanted}, each on one node"
        return ServerError(
            f"the Ray cluster had no room for {spec.label or spec.model} within "
            f"{self._settings.placement_timeout_s:g} s: asked for {what}; it has {len(nodes)} nodes ({has}{more}), "
            f"with {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free in all"
        )


def _name(spec: RankSpec, rank: int) -> str:
    who = "the rank" if spec.settings.parallel.data_parallel_size == 1 else f"rank {rank}"
    return f"{who} of {spec.label or spec.model}"


async def _gather_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of it, or the first failure once everything has ended."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """In a thread of its own that the process does not wait for: Ray may never come back from a call."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def end(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = function()
        except BaseException as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(end, result, failed)

    threading.Thread(target=run, name="descant-ray", daemon=True).start()
    return future


def _check_address(address: str) -> None:
    """Ray tries for a minute to reach what is not there. Raises ``UserError``."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        raise UserError(f"ray.address is {address!r}, expected host:port of the cluster's head, or 'auto'")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except OSError as error:
        raise UserError(f"no Ray cluster at ray.address {address!r}: {error.strerror or error}") from None
