"""What an owner may have: one check a kind, and the sentence for who has it all."""

from __future__ import annotations

import json

from descant.errors import QuotaExceeded, UserError
from descant.service.settings import MAX_LABEL_LENGTH, MAX_METADATA_BYTES, QuotaSettings
from descant.types import Lora, ModelFacts, Trainable

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

STATE_BYTES = 16
"""A trained number: itself, two moments and a gradient, in float32."""

MAX_MODEL_RECORDS = 100_000
"""Of one owner that are remembered, whatever became of the models."""


def check_metadata(**fields: object) -> None:
    """Raises ``UserError`` for one that is longer than it may be, as JSON."""
    for name, value in fields.items():
        size = len(json.dumps(value)) if value else 0
        if size > MAX_METADATA_BYTES:
            raise UserError(f"{name} has {size} bytes as JSON, expected at most {MAX_METADATA_BYTES}")


def check_labels(**fields: str | None) -> None:
    for name, value in fields.items():
        if value is not None and len(value) > MAX_LABEL_LENGTH:
            raise UserError(f"{name} has {len(value)} characters, expected at most {MAX_LABEL_LENGTH}")


def version_bytes(facts: ModelFacts, trainable: Trainable) -> int:
    """What a published version takes, wherever it lies: its numbers in the base's dtype."""
    return _numbers(facts, trainable) * ITEM_BYTES[facts.dtype]


def model_bytes(facts: ModelFacts, trainable: Trainable) -> int:
    """What a model in training takes, wherever it lies."""
    return _numbers(facts, trainable) * STATE_BYTES


def _numbers(facts: ModelFacts, trainable: Trainable) -> int:
    """An adapter's are a row's, which is as long as for the next power of two (at least 8) of the rank, whatever is
    trained; a full model's are the base's."""
    if isinstance(trainable, Lora):
        return facts.adapter_numbers_per_rank << max(3, (trainable.rank - 1).bit_length())
    return facts.num_params


class Quotas:
    """The counts are their owners' to keep; here they are compared. All raise ``QuotaExceeded``."""

    def __init__(self, settings: QuotaSettings):
        self.settings = settings

    def check_sessions(self, have: int) -> None:
        if have >= self.settings.sessions:
            raise QuotaExceeded(
                f"you have {have} open sessions, expected at most {self.settings.sessions} (quota.sessions); close "
                "those that you do not use, as a service client does at the end of its with block"
            )

    def check_samplers(self, have: int) -> None:
        if have >= self.settings.samplers:
            raise QuotaExceeded(
                f"you have {have} sampling sessions, expected at most {self.settings.samplers} (quota.samplers); they "
                "end with their session"
            )

    def check_models(self, have: int, have_bytes: int, num_bytes: int) -> None:
        """``have_bytes`` of ``have`` models; one more takes ``num_bytes``."""
        settings = self.settings
        if have >= settings.models:
            raise QuotaExceeded(
                f"you have {have} models, expected at most {settings.models} (quota.models); they end with their "
                "session, so close those that you do not use"
            )
        if settings.model_bytes is not None and have_bytes + num_bytes > settings.model_bytes:
            raise QuotaExceeded(
                f"this model would take {num_bytes} bytes beside the {have_bytes} of your others, expected at most "
                f"{settings.model_bytes} together (quota.model_bytes); they end with their session, so close those "
                "that you do not use, or choose a lower rank"
            )

    def check_model_records(self, have: int) -> None:
        if have >= MAX_MODEL_RECORDS:
            raise QuotaExceeded(
                f"you have made {have} models that are still remembered, expected at most {MAX_MODEL_RECORDS}; they "
                "are forgotten some days after their session has ended (service.keep_ended_s)"
            )

    def check_journal(self, have_bytes: int, num_bytes: int) -> None:
        """``have_bytes`` of bodies that would be repeated after a death; one more has ``num_bytes``."""
        most = self.settings.journal_bytes
        if most is not None and have_bytes + num_bytes > most:
            raise QuotaExceeded(
                f"this request has {num_bytes} bytes beside the {have_bytes} of yours that would be repeated after a "
                f"death, expected at most {most} together (quota.journal_bytes); after an optimiser step those before "
                "it are forgotten"
            )

    def check_checkpoints(self, have: int, have_bytes: int, num_bytes: int) -> None:
        """``have_bytes`` of ``have`` checkpoints, without one that is to be replaced; one more takes ``num_bytes``."""
        settings = self.settings
        if have >= settings.checkpoints:
            raise QuotaExceeded(
                f"you have {have} checkpoints, expected at most {settings.checkpoints} (quota.checkpoints); save with "
                "ttl_seconds those that need not stay"
            )
        if settings.checkpoint_bytes is not None and have_bytes + num_bytes > settings.checkpoint_bytes:
            raise QuotaExceeded(
                f"your checkpoints take {have_bytes} bytes, and {num_bytes} more are more than the "
                f"{settings.checkpoint_bytes} that they may take (quota.checkpoint_bytes); save with ttl_seconds those "
                "that need not stay"
            )
