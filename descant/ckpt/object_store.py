"""Checkpoints in an object store: whole or absent, whatever dies when.

    epoch                               how often a server has started on this URL
    names/{model}/{type}/{name}         which attempt is the checkpoint of this name, and its manifest
    files/{attempt}/…                   an attempt's files

There is no rename there. An attempt's files are put under a key of its own, and are nobody's until the last object: the
name's, which is put only if there is none (a first save) or only in place of exactly the one that was found (a
replacement). That one conditional write is the commit. What it replaces is removed afterwards.

Ranks write and read files: an attempt is a local directory that ``commit`` sends, and what is opened is fetched into a
local one, verified, and renamed into its place. Such copies have a bound; the least recently opened go first.

One server at a time: each start raises the epoch, and who has an older one commits nothing any more.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast
from weakref import WeakValueDictionary

from descant.ckpt.disk import REAL, remove_tree
from descant.ckpt.local_copies import LocalCopies, check_files
from descant.ckpt.manifest import (
    MANIFEST,
    check_name,
    check_size,
    damaged,
    decode_manifest,
    encode_manifest,
    seal,
    unseal,
)
from descant.ckpt.remote import Conflict, ObjectInfo, Remote, Unknown
from descant.ckpt.store import TYPES, segment, segments, unsegment
from descant.errors import CannotStore, Damaged, NotFound, ServerError, UserError
from descant.storage import PRIVATE, cannot_store
from descant.types import Checkpoint, CheckpointName, CheckpointType, FileEntry, Manifest

log = logging.getLogger(__name__)

ATTEMPT = re.compile(r"[0-9]+-[0-9a-f]{16}")
EPOCH, NAMES, FILES = "epoch", "names", "files"
ATTEMPTS, FETCHED = "attempts", "fetched"
PART_BYTES = 16 << 20
"""Of a file, in one request."""
LEFT_ALONE = timedelta(hours=1)
"""What nobody names and is younger may be about to be named, by a server that does not know yet that its time is
over: a commit's last request ends long before."""
START_TRIES = 5


@dataclass(frozen=True, slots=True)
class Named:
    """What a name's object says. ``order``: of commits, across starts."""

    attempt: str
    order: tuple[int, int]
    manifest: Manifest


class ObjectCheckpointStore:
    """``CheckpointStore`` on a ``Remote``, of one server. Call ``start`` first."""

    def __init__(
        self,
        remote: Remote,
        local: str | Path,
        *,
        max_local_bytes: int,
        monotonic: Callable[[], float] = time.monotonic,
        left_alone: timedelta = LEFT_ALONE,
    ):
        """``local``: a directory for attempts and copies, of this server alone; what is in these is removed.
        ``max_local_bytes``: of copies. ``monotonic``: seconds. ``left_alone``: how long what nobody names stays."""
        self.remote = remote
        self._local = Path(local)
        self._copies = LocalCopies(self._local / FETCHED, max_local_bytes, monotonic)
        self._left_alone = left_alone
        self._epoch = 0
        self._num_commits = 0
        self._known: dict[str, tuple[Mapping[str, str], Named]] = {}
        """By path of a name's object, of the version that was read."""
        self._fetching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By attempt, so that two who open one checkpoint fetch it once."""

    async def start(self) -> None:
        """Begins a new epoch and removes what earlier ones have left. Raises ``ServerError``, ``OSError``."""
        await asyncio.to_thread(self._clear)
        self._epoch = await self._begin_epoch()
        try:
            await self._clean()
        except ServerError as error:
            log.warning("what earlier servers have left in %s stays until the next start: %s", self.remote.name, error)

    async def attempt(self, name: CheckpointName) -> str:
        _key(name)
        path = self._local / ATTEMPTS / f"{self._epoch}-{secrets.token_hex(8)}"
        try:
            await asyncio.to_thread(REAL.mkdir, path)
        except OSError as error:
            raise cannot_store(error) from None
        return str(path)

    async def commit(self, name: CheckpointName, attempt: str, manifest: Manifest) -> Checkpoint:
        path, key = Path(attempt), _key(name)
        self._check_own(name, path)
        try:
            await asyncio.to_thread(check_files, path, manifest)
        except Damaged as error:
            raise ServerError(f"{name.uri} was not written whole: {error}") from None
        try:
            found = await self._object(key)
            await _all(self.remote.put_file(f"{FILES}/{path.name}/{file}", path / file) for file in manifest.files)
            await self._check_sizes(path.name, manifest)
            await self._check_epoch(name)
        except (Damaged, OSError, ServerError) as error:
            await self._remove_files(path.name)
            if isinstance(error, OSError):
                raise cannot_store(error) from None
            raise CannotStore(f"{name.uri} is not kept: {error}") from None
        await self._put_name(name, Named(path.name, self._next_order(), manifest), replaces=found)
        if found is not None:
            await self._forget(found)
        directory = self._copies.place(path.name)
        try:
            await asyncio.to_thread(self._copies.take, path, path.name, manifest)
        except OSError as error:
            log.warning("%s was saved, and must be fetched to be read: %s", name.uri, error)
        return Checkpoint(name=name, directory=str(directory), manifest=manifest)

    async def abandon(self, attempt: str) -> None:
        path = Path(attempt)
        if path.parent == self._local / ATTEMPTS:
            await asyncio.to_thread(remove_tree, REAL, path)

    async def open(self, name: CheckpointName) -> Checkpoint:
        named = await self._find(name)
        try:
            await self._check_sizes(named.attempt, named.manifest)
            directory = await self._fetched(named)
        except (Damaged, FileNotFoundError) as error:
            if await self._find(name) != named:
                raise UserError(f"{name.uri} was replaced while it was opened; open it again") from None
            raise damaged(name.uri, error if isinstance(error, Damaged) else Damaged("a file is missing")) from None
        except OSError as error:
            raise cannot_store(error) from None
        return Checkpoint(name=name, directory=str(directory), manifest=named.manifest)

    async def list(self, model_id: str | None = None) -> Sequence[Checkpoint]:
        prefix = f"{NAMES}/" if model_id is None else f"{NAMES}/{_part(model_id)}/"
        infos = [info for info in await self.remote.list(prefix) if _is_key(info.path)]
        if model_id is None:
            there = {info.path for info in infos}
            self._known = {path: known for path, known in self._known.items() if path in there}
        found: list[tuple[tuple[int, int], Checkpoint]] = []
        for info, named in zip(infos, await _all(self._named(info.path, info.version) for info in infos)):
            if isinstance(named, Named):
                directory = str(self._copies.place(named.attempt))
                found.append(
                    (named.order, Checkpoint(name=_name(info.path), directory=directory, manifest=named.manifest))
                )
        found.sort(key=lambda item: item[0], reverse=True)
        return [checkpoint for _, checkpoint in found]

    async def delete(self, name: CheckpointName) -> None:
        key = _key(name)
        found = await self._object(key)
        if found is None:
            raise NotFound(f"there is no checkpoint {name.uri}")
        await self.remote.delete([key])
        await self._forget(found)

    # ------------------------------------------------------------------------------------------------ start
    def _clear(self) -> None:
        """Nobody vouches for local copies of an earlier process: a power cut may have left anything of them."""
        self._local.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        for directory in (self._local / ATTEMPTS, self._local / FETCHED):
            remove_tree(REAL, directory)
            directory.mkdir(mode=PRIVATE, exist_ok=True)

    async def _begin_epoch(self) -> int:
        for _ in range(START_TRIES):
            body, info = await self._read_epoch()
            try:
                await self.remote.put(EPOCH, b"%d\n" % (body + 1), replaces=info)
                return body + 1
            except (Conflict, FileNotFoundError):
                continue  # another server starts at this moment
        raise ServerError(f"other servers start on {self.remote.name} all the time; one has it at a time")

    async def _read_epoch(self) -> tuple[int, ObjectInfo | None]:
        try:
            body, info = await self.remote.get(EPOCH)
        except FileNotFoundError:
            return 0, None
        try:
            return int(body), info
        except ValueError:
            raise ServerError(
                f"{EPOCH} in {self.remote.name} holds {body[:20]!r}, expected a number: how often a server has "
                "started there"
            ) from None

    async def _clean(self) -> None:
        infos = [info for info in await self.remote.list(f"{NAMES}/") if _is_key(info.path)]
        named = await _all(self._named(info.path, info.version) for info in infos)
        if any(isinstance(found, Damaged) for found in named):
            log.warning("a name in %s cannot be read, so nothing is removed there", self.remote.name)
            return
        live = {found.attempt for found in named if isinstance(found, Named)}
        _, epoch = await self.remote.get(EPOCH)
        for directory in await self.remote.directories(FILES):
            if directory.rpartition("/")[2] not in live:
                objects = await self.remote.list(directory + "/")
                if all(epoch.modified - found.modified > self._left_alone for found in objects):
                    await self.remote.delete([found.path for found in objects])

    # ------------------------------------------------------------------------------------------------ names
    async def _object(self, key: str) -> tuple[ObjectInfo, Named | Damaged] | None:
        try:
            body, info = await self.remote.get(key)
        except FileNotFoundError:
            return None
        try:
            return info, _decode(body)
        except Damaged as error:
            return info, error

    async def _find(self, name: CheckpointName) -> Named:
        found = await self._object(_key(name))
        if found is None:
            raise NotFound(f"there is no checkpoint {name.uri}")
        if isinstance(found[1], Damaged):
            raise damaged(name.uri, found[1])
        return found[1]

    async def _named(self, key: str, version: Mapping[str, str]) -> Named | Damaged | None:
        """None: it has been deleted meanwhile."""
        known = self._known.get(key)
        if known is not None and version and known[0] == version:
            return known[1]
        found = await self._object(key)
        if found is None:
            return None
        if isinstance(found[1], Named):
            self._known[key] = (found[0].version, found[1])
        return found[1]

    def _next_order(self) -> tuple[int, int]:
        self._num_commits += 1
        return self._epoch, self._num_commits

    async def _put_name(
        self, name: CheckpointName, named: Named, *, replaces: tuple[ObjectInfo, Named | Damaged] | None
    ) -> None:
        """The commit. Raises ``CannotStore``: it was none, and the files are removed, unless nobody can tell."""
        key = _key(name)
        unknown: Unknown | None = None
        try:
            await self.remote.put(key, _encode(named), replaces=None if replaces is None else replaces[0])
            return
        except Unknown as error:
            unknown = error
        except (Conflict, FileNotFoundError):
            pass  # or it was done, its answer lost, and the request repeated
        try:
            found = await self._object(key)
        except ServerError as error:
            raise CannotStore(f"{name.uri} is not known to be kept: {unknown or error}") from None
        if found is not None and found[1] == named:
            return
        if unknown is not None:
            raise CannotStore(f"{name.uri} is not known to be kept: {unknown}") from None
        await self._remove_files(named.attempt)
        raise CannotStore(f"{name.uri} is not kept: it was saved or deleted by another server meanwhile")

    async def _forget(self, found: tuple[ObjectInfo, Named | Damaged]) -> None:
        """Removes the files of what has no name any more."""
        if isinstance(found[1], Named):
            await asyncio.to_thread(self._copies.remove, found[1].attempt)
            await self._remove_files(found[1].attempt)

    # ------------------------------------------------------------------------------------------------ files
    async def _check_sizes(self, attempt: str, manifest: Manifest) -> None:
        """Raises ``Damaged``."""
        prefix = f"{FILES}/{attempt}/"
        there = {info.path.removeprefix(prefix): info.size_bytes for info in await self.remote.list(prefix)}
        for file, entry in manifest.files.items():
            check_name(file)
            if file not in there:
                raise Damaged(f"{file} is missing")
            check_size(file, there[file], entry)

    async def _remove_files(self, attempt: str) -> None:
        """What cannot be removed stays until the next start."""
        try:
            await self.remote.delete([info.path for info in await self.remote.list(f"{FILES}/{attempt}/")])
        except (ServerError, OSError) as error:
            log.warning("files of attempt %s stay in %s until the next start: %s", attempt, self.remote.name, error)

    async def _fetched(self, named: Named) -> Path:
        """Where its files lie, verified when they came. Raises ``Damaged``, ``FileNotFoundError``, ``OSError``."""
        async with self._fetching.setdefault(named.attempt, asyncio.Lock()):
            place = await asyncio.to_thread(self._copies.find, named.attempt, named.manifest)
            if place is not None:
                return place
            part = self._local / ATTEMPTS / f"{self._epoch}-{secrets.token_hex(8)}"
            try:
                await asyncio.to_thread(self._copies.make_room, named.manifest.size_bytes)
                await asyncio.to_thread(REAL.mkdir, part)
                for file, entry in named.manifest.files.items():
                    await self._fetch(f"{FILES}/{named.attempt}/{file}", part / file, entry)
                return await asyncio.to_thread(self._copies.take, part, named.attempt, named.manifest)
            finally:
                await asyncio.to_thread(remove_tree, REAL, part)

    async def _fetch(self, path: str, file: Path, entry: FileEntry) -> None:
        digest = hashlib.sha256()
        writing = REAL.create(file)
        try:
            for start in range(0, entry.size_bytes, PART_BYTES):
                part = await self.remote.get_range(path, start, min(start + PART_BYTES, entry.size_bytes))
                await asyncio.to_thread(writing.write, part)
                await asyncio.to_thread(digest.update, part)
        finally:
            writing.close()
        if digest.hexdigest() != entry.sha256:
            raise Damaged(f"{file.name} has another sha256 than its manifest says")

    # ------------------------------------------------------------------------------------------------ epochs
    def _check_own(self, name: CheckpointName, attempt: Path) -> None:
        epoch = attempt.name.partition("-")[0]
        if attempt.parent != self._local / ATTEMPTS or epoch != str(self._epoch):
            raise ServerError(
                f"{name.uri} was written under epoch {epoch} of {self.remote.name}, expected {self._epoch}: it is not "
                "kept"
            )

    async def _check_epoch(self, name: CheckpointName) -> None:
        now, _ = await self._read_epoch()
        if now != self._epoch:
            raise ServerError(
                f"{name.uri} is not kept: another server has begun epoch {now} of {self.remote.name}, "
                f"and this one's was {self._epoch}"
            )


T = TypeVar("T")


async def _all(work: Iterable[Awaitable[T]]) -> Sequence[T]:
    """All results, once all have ended. Raises the first failure."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast(Sequence[T], results)


def _part(text: str) -> str:
    """A segment in which no character is an escape to an object store."""
    return segment(text).replace("%", "=")


def _key(name: CheckpointName) -> str:
    """Raises ``UserError``."""
    return "/".join([NAMES, *segments(name)]).replace("%", "=")


def _is_key(path: str) -> bool:
    parts = path.split("/")
    return len(parts) == 4 and parts[0] == NAMES and parts[2] in TYPES


def _name(key: str) -> CheckpointName:
    _, model, kind, own = key.replace("=", "%").split("/")
    return CheckpointName(model_id=unsegment(model), type=cast(CheckpointType, kind), name=unsegment(own))


def _encode(named: Named) -> bytes:
    manifest = encode_manifest(named.manifest).decode()
    return seal({"attempt": named.attempt, "order": list(named.order), "manifest": manifest})


def _decode(body: bytes) -> Named:
    """Raises ``Damaged``."""
    try:
        fields = unseal(body, where=MANIFEST)
        epoch, number = fields["order"]
        manifest = decode_manifest(str(fields["manifest"]).encode(), where=MANIFEST)
        if not ATTEMPT.fullmatch(fields["attempt"]):
            raise Damaged(f"{MANIFEST} names {fields['attempt'][:40]!r}, which is no attempt")
        return Named(fields["attempt"], (int(epoch), int(number)), manifest)
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(f"{MANIFEST} is not a checkpoint's: {type(error).__name__}: {error}") from None
