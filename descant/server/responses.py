"""Answers over HTTP. Every one has a body and a Content-Length (the SDK takes a 400 without for a proxy's fault)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from descant.errors import DescantError, Overloaded
from descant.service.futures import Pending, Submitted
from descant.wire.encode import describe_error


def json_response(
    payload: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json.dumps(payload).encode(), status_code=status, headers=headers, media_type="application/json")


def error_response(error: Exception) -> Response:
    """``{detail, category}``: a sentence for the user, with the status of the error's kind."""
    message, category = describe_error(error)
    status = error.http_status if isinstance(error, DescantError) else 500
    headers = {}
    if status == 408:  # the rest of the request may still come, or never
        headers = {"connection": "close"}
    if isinstance(error, Overloaded):
        headers = {
            "retry-after": str(max(1, math.ceil(error.retry_after_s))),
            "retry-after-ms": str(max(1, math.ceil(error.retry_after_s * 1000))),
        }
    return json_response({"detail": message, "category": category}, status=status, headers=headers)


def submitted_response(submitted: Submitted) -> Response:
    payload: dict[str, Any] = {"request_id": submitted.request_id}
    if submitted.model_id is not None:
        payload["model_id"] = submitted.model_id
    if submitted.sample_sequence_ids is not None:
        payload["sample_sequence_ids"] = submitted.sample_sequence_ids
    return json_response(payload)


def try_again_response(pending: Pending) -> Response:
    """408: the SDK polls again at once (a 200 with the same body makes it print a warning each time)."""
    return json_response(
        {
            "type": "try_again",
            "request_id": pending.request_id,
            "queue_state": pending.queue_state,
            "queue_state_reason": pending.reason,
        },
        status=408,
    )
