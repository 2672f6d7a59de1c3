"""Where to resume from, for the errors of models and samplers that did not survive."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from descant.errors import Lost
from descant.ports import CheckpointStore
from descant.service.names import parse_path
from descant.service.registry import ModelRecord, Registry, SamplingSessionRecord
from descant.types import CheckpointName, CheckpointType, FutureState

log = logging.getLogger(__name__)

BEST_FIRST: tuple[CheckpointType, ...] = ("weights", "sampler_weights")


class Resume:
    def __init__(self, *, registry: Registry, checkpoints: CheckpointStore):
        self._registry = registry
        self._checkpoints = checkpoints

    async def model(self, model_id: str) -> Lost:
        record = await self._registry.model(model_id)
        why = record.status_reason if record is not None and record.status_reason else "its process ended"
        return Lost(f"model {model_id!r} is lost ({why}); {await self._where(model_id, record)}")

    async def sampler(self, sampler: SamplingSessionRecord) -> Lost:
        """Of an ephemeral sampling session; one on a path has its file."""
        assert sampler.version is not None
        model_id = sampler.version.model_id
        record = await self._registry.model(model_id)
        where: object = f"model {model_id!r} is there: save its weights for sampling again"
        if record is None or record.status != "live":
            where = await self.model(model_id)
        return Lost(
            f"the weights of sampling session {sampler.sampling_session_id!r} were never written to a file; {where}"
        )

    async def interrupted(self, pending: Sequence[FutureState]) -> Mapping[str, Lost]:
        """By request id, for futures that were pending when the server ended and cannot go on. Many may be of one model
        or sampler, which is looked up once."""
        whys: dict[tuple[str, str], str] = {}
        for state in pending:
            kind, scope = state.key.kind, state.key.scope
            if (kind, scope) not in whys:
                whys[kind, scope] = await self._why(kind, scope)
        return {
            state.request_id: Lost(
                f"{state.operation} did not end before the server was restarted: "
                + whys[state.key.kind, state.key.scope]
            )
            for state in pending
        }

    async def _why(self, kind: str, scope: str) -> str:
        if kind == "train":
            return str(await self.model(scope))
        if kind == "sample":
            sampler = await self._registry.sampling_session(scope)
            if sampler is not None and sampler.ephemeral:
                return str(await self.sampler(sampler))
            return "sample again"
        return "create it again with another client"

    async def _where(self, model_id: str, record: ModelRecord | None) -> str:
        try:
            found = await self._checkpoints.list(model_id)
        except Exception:
            log.exception("the checkpoints of model %s could not be listed", model_id)
            return "its checkpoints could not be listed"
        for type_ in BEST_FIRST:
            for checkpoint in found:  # newest first
                if checkpoint.name.type == type_ and await self._opens(checkpoint.name):
                    return f"its newest checkpoint to resume from is {checkpoint.name.uri}"
        source = None if record is None else record.source_uri
        if source is not None and await self._opens(parse_path(source)):
            return f"it has no checkpoint of its own; it was made from {source}"
        return "it has no checkpoint to resume from"

    async def _opens(self, name: CheckpointName) -> bool:
        """Whether its manifest is whole, and its files have the sizes that it says."""
        try:
            await self._checkpoints.open(name)
        except Exception as error:
            log.warning("%s is not offered to resume from: %s", name.uri, error)
            return False
        return True
