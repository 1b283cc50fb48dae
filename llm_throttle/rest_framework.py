"""What REST framework needs on top: refusals in its shape, and a renderer for event streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rest_framework.exceptions import APIException
from rest_framework.renderers import BaseRenderer, JSONRenderer

from .exceptions import Refused


class ThrottleRefused(APIException):
    """A refusal for REST framework's exception handler, with the same fields as everywhere."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.detail, code=refusal.reason)
        self.status_code = refusal.status_code
        self.detail = refusal.as_problem()  # type: ignore[assignment]  # not only strings in it
        self.refusal = refusal
        if refusal.retry_after is not None:
            self.wait = refusal.retry_after  # what the handler makes the Retry-After header of


class EventStreamRenderer(BaseRenderer):
    """Lets ``Accept: text/event-stream`` through negotiation; the view streams by itself.

    What is rendered all the same (errors, refusals) becomes one ``error`` event.
    """

    media_type = "text/event-stream"
    format = "events"
    charset = "utf-8"

    def render(
        self,
        data: Any,
        accepted_media_type: str | None = None,
        renderer_context: Mapping[str, Any] | None = None,
    ) -> bytes:
        text = JSONRenderer().render(data).decode()
        return f"event: error\ndata: {text}\n\n".encode()
