"""A WebSocket that is guarded against rude clients, and tells when its own has gone.

Nothing here depends on ``disconnect()``: some servers drop a socket without calling it. A
connection's tasks end with the call that serves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from asgiref.typing import ASGIReceiveCallable, ASGISendCallable
from channels.generic.websocket import AsyncJsonWebsocketConsumer

from . import messages
from .conf import settings
from .identity import Caller
from .messages import Message

logger = logging.getLogger(__name__)

BAD_MESSAGE = 4400
FOREIGN_TICKET = 4403
UNKNOWN_UPSTREAM = 4404
NOT_READING = 4408
TOO_LARGE = 4413
FLOOD = 4429

_running: set[asyncio.Task[None]] = set()
"""Tasks in progress: an event loop itself knows them only weakly."""


class ClientLeft(Exception):
    """The socket was closed while something was to be sent."""


class NotReading(Exception):
    """The client has not taken a message in time."""


class GuardedConsumer(AsyncJsonWebsocketConsumer):
    """A socket that takes JSON objects with a known ``type``, not too large and not too many."""

    max_bytes = 64 * 1024
    max_rate = 20
    """Messages per second that a client may send; as many may come at once."""

    handlers: Mapping[str, str] = {}
    """The method for each type of message."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._task: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()
        self._quiet: asyncio.TimerHandle | None = None
        self._credit = float(self.max_rate)
        self._credit_at = time.monotonic()
        self._is_over = False

    # -- The connection -----------------------------------------------------------------------

    async def __call__(
        self, scope: Any, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()

    async def accept(self, *args: Any, **kwargs: Any) -> None:
        await super().accept(*args, **kwargs)
        self._keep_alive_later()

    async def disconnect(self, code: int) -> None:
        self._end()

    def _end(self) -> None:
        self._is_over = True
        if self._quiet is not None:
            self._quiet.cancel()
        if self._task is not None:
            self._task.cancel()

    def _start(self, work: Any) -> None:
        """Do something beside receiving; it ends with the connection."""
        self._task = asyncio.create_task(work)
        _running.add(self._task)
        self._task.add_done_callback(_running.discard)

    @property
    def is_busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def caller(self, upstream: str) -> Caller:
        return Caller(upstream, self.scope.get("user"), scope=self.scope)

    def query(self, name: str) -> str:
        values = parse_qs(self.scope.get("query_string", b"").decode("latin-1")).get(name)
        return values[0] if values else ""

    # -- Receiving ----------------------------------------------------------------------------

    async def receive(
        self, text_data: str | None = None, bytes_data: bytes | None = None, **kwargs: Any
    ) -> None:
        if self._is_over:
            return
        if not self._may_speak():
            await self.fail("flood", "Too many messages a second.", FLOOD)
        elif text_data is None:
            await self.fail("not_json", "Messages are text frames with JSON.", BAD_MESSAGE)
        elif len(text_data.encode(errors="replace")) > self.max_bytes:
            await self.fail(
                "too_large", f"A message has {self.max_bytes} bytes at most.", TOO_LARGE
            )
        else:
            await self._take(text_data)

    async def _take(self, text: str) -> None:
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            await self.fail("not_json", "The message is not JSON.", BAD_MESSAGE)
            return
        kind = message.get("type") if isinstance(message, dict) else None
        handler = self.handlers.get(kind) if isinstance(kind, str) else None
        if handler is None:
            known = ", ".join(self.handlers)
            await self.fail("unknown_type", f"A message is an object; its type is one of: {known}.")
        else:
            await getattr(self, handler)(message)

    def _may_speak(self) -> bool:
        """Let ``max_rate`` messages a second through."""
        now = time.monotonic()
        self._credit = min(
            float(self.max_rate), self._credit + (now - self._credit_at) * self.max_rate
        )
        self._credit_at = now
        self._credit -= 1
        return self._credit >= 0

    # -- Sending ------------------------------------------------------------------------------

    async def say(self, message: Message, within: float | None = None) -> None:
        """Send a message. Raises ``NotReading`` where the client does not take it in time, and
        ``ClientLeft``.
        """
        if self._is_over:
            return
        try:
            async with asyncio.timeout(within or settings.IDLE_STREAM), self._sending:
                await self.send_json(message)
        except TimeoutError as error:
            raise NotReading from error
        except (OSError, RuntimeError) as error:  # what servers raise on a socket that is closed
            self._is_over = True
            raise ClientLeft from error
        self._keep_alive_later()

    async def fail(self, code: str, detail: str, close: int | None = None) -> None:
        """Say what was wrong; ``close`` ends the connection with that code."""
        try:
            await self.say(messages.error(code, detail), settings.START_GRACE)
        except NotReading:
            close = close or NOT_READING
        except ClientLeft:
            return
        if close is not None:
            await self.hang_up(close)

    async def hang_up(self, code: int) -> None:
        self._is_over = True
        with contextlib.suppress(OSError, RuntimeError):  # it is closed already
            await self.close(code)

    def _keep_alive_later(self) -> None:
        """Never be silent for longer than a proxy waits."""
        if self._quiet is not None:
            self._quiet.cancel()
        if not self._is_over:
            loop = asyncio.get_running_loop()
            self._quiet = loop.call_later(settings.KEEP_ALIVE, self._keep_alive)

    def _keep_alive(self) -> None:
        if not self._sending.locked():
            task = asyncio.ensure_future(self._say_alive())
            _running.add(task)
            task.add_done_callback(_running.discard)

    async def _say_alive(self) -> None:
        try:
            await self.say({"type": "keep_alive"})
        except Exception:  # it is gone, or reads nothing; whoever talks to it finds out
            logger.debug("A keep-alive was not sent", exc_info=True)
