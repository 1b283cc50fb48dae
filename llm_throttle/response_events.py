"""A view's response as server-sent events: its handler is called late, when the slot is there.

So its status and headers come too late to be sent, and what it raises becomes an ``error`` event.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.exceptions import PermissionDenied
from django.core.signals import got_request_exception
from django.http import Http404
from django.http.response import HttpResponseBase

from . import messages
from .bodies import Resources, ThreadedBody
from .exceptions import Refused
from .lease import Lease

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """A view's handler with its arguments, to be run when the slot is there."""

    handler: Callable[..., Any]
    request: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    take: Callable[[Lease], None]
    finish: Callable[..., Any] | None = None

    def run(self) -> HttpResponseBase:
        """The handler's response, made ready to be read."""
        return self._finished(self.handler(self.request, *self.args, **self.kwargs))

    async def arun(self) -> HttpResponseBase:
        if not iscoroutinefunction(self.handler):
            return await sync_to_async(self.run)()
        response = await self.handler(self.request, *self.args, **self.kwargs)
        return await sync_to_async(self._finished)(response)

    def _finished(self, response: Any) -> HttpResponseBase:
        if self.finish is not None:  # REST framework's renderers
            response = self.finish(self.request, response, *self.args, **self.kwargs)
        if hasattr(response, "render") and not response.is_rendered:
            response.render()
        if not isinstance(response, HttpResponseBase):
            raise TypeError(f"The view returned {response!r} and not a response.")
        return response


def error_event(error: Exception, request: Any) -> bytes:
    """What a handler raised, as far as it is the client's business."""
    if isinstance(error, Refused):
        return messages.refused_event(error)
    status = _status_of(error)
    if status >= 500:
        logger.error("A throttled view failed: %s", request.path, exc_info=error)
        got_request_exception.send(sender=error_event, request=request)
    return _http_error(status, str(getattr(error, "detail", "")))


def _status_of(error: Exception) -> int:
    if isinstance(error, Http404):
        return 404
    if isinstance(error, PermissionDenied):
        return 403
    return int(getattr(error, "status_code", 500))


def _http_error(status: int, detail: str = "", **more: Any) -> bytes:
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else f"Status {status}"
    message = messages.error(f"http_{status}", detail or phrase, status=status, **more)
    return messages.as_event(message)


def content_event(response: Any) -> bytes:
    """A response that is no stream as one event: ``message``, or ``error`` from status 400."""
    text = response.content.decode(response.charset or "utf-8", errors="replace")
    if response.status_code >= 400:
        return _http_error(response.status_code, content=text)
    lines = "".join(f"data: {line}\n" for line in text.splitlines() or [""])
    return f"{lines}\n".encode()


def _is_events(response: HttpResponseBase) -> bool:
    return str(response.get("Content-Type", "")).startswith("text/event-stream")


class _Texts:
    """Chunks of any other body as ``token`` events; letters may be cut in two between chunks."""

    def __init__(self, response: HttpResponseBase) -> None:
        charset = response.charset or "utf-8"
        self._decoder = codecs.getincrementaldecoder(charset)(errors="replace")

    def event(self, chunk: Any) -> bytes:
        text = chunk if isinstance(chunk, str) else self._decoder.decode(chunk)
        return messages.as_event(messages.token(text)) if text else b""


async def response_events(response: HttpResponseBase) -> AsyncGenerator[Any, None]:
    """The events of a response, whatever its kind; it is closed with them."""
    if not response.streaming:
        yield content_event(response)
        return
    found = response._iterator  # type: ignore[attr-defined]  # streaming_content hides aclose()
    body = found if response.is_async else ThreadedBody(found)  # type: ignore[attr-defined]  # same
    resources = Resources.of(response, found)  # type: ignore[arg-type]  # it is a streaming one
    texts = None if _is_events(response) else _Texts(response)
    try:
        async for chunk in body:
            if event := texts.event(chunk) if texts else chunk:
                yield event
    finally:
        if hasattr(body, "aclose"):
            await body.aclose()
        await resources.aclose()
    if texts:
        yield messages.as_event(messages.done())


def sync_response_events(response: HttpResponseBase) -> Generator[Any, None, None]:
    """``response_events`` of a response that can be read in a thread."""
    if not response.streaming:
        yield content_event(response)
        return
    body = response._iterator  # type: ignore[attr-defined]  # as above
    resources = Resources.of(response, body)  # type: ignore[arg-type]  # as above
    texts = None if _is_events(response) else _Texts(response)
    try:
        for chunk in body:
            if event := texts.event(chunk) if texts else chunk:
                yield event
    finally:
        if hasattr(body, "close"):
            body.close()
        resources.close()
    if texts:
        yield messages.as_event(messages.done())
