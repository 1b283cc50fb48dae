"""Chats and queue positions over WebSocket (docs/howto/waiting_clients.md has the messages).

Nothing here depends on ``disconnect()``: some servers drop a socket without calling it. A
connection's tasks end with the call that serves it, and a lease with whoever uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import weakref
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import parse_qs

from asgiref.typing import ASGIReceiveCallable, ASGISendCallable
from channels.db import aclose_old_connections
from channels.generic.websocket import AsyncJsonWebsocketConsumer
from django.core.exceptions import ImproperlyConfigured

from . import messages
from .conf import settings
from .exceptions import ForeignTicket, LeaseLost, Refused, UnknownUpstream
from .identity import Caller, aidentify
from .lease import Lease
from .messages import Message
from .models import Upstream
from .positions import Left, News, Subscription, TaskAlarm, watch
from .queue_events import as_ticket
from .request import Request
from .streaming import AsyncLeasedStream
from .waiting import AsyncWaiting
from .worker import current

logger = logging.getLogger(__name__)

BAD_MESSAGE = 4400
FOREIGN_TICKET = 4403
UNKNOWN_UPSTREAM = 4404
NOT_READING = 4408
TOO_LARGE = 4413
FLOOD = 4429

MAX_WATCHED = 16
"""Tickets that one client may name; a user seldom has more requests at once."""

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


class ThrottledChatConsumer(GuardedConsumer):
    """A chat: each message waits in line, is replied to, and holds a slot while it is.

    Set ``upstream`` and write ``async def reply(self, message)``, an async iterator of texts.
    """

    upstream: str = ""
    handlers = {"message": "hear_message", "cancel": "hear_cancel"}  # noqa: RUF012 - a constant

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not self.upstream:
            raise ImproperlyConfigured(f"{type(self).__name__} does not say its upstream.")
        super().__init__(*args, **kwargs)
        self._gives_up = False
        self._lease: weakref.ref[Lease] | None = None
        self._first_ticket: str | None = None

    def reply(self, message: Message) -> AsyncIterator[str]:
        """The reply to a message, text by text. It is closed when the client leaves."""
        raise NotImplementedError

    @property
    def lease(self) -> Lease:
        """What ``reply`` holds, to ``report()`` what the provider answered."""
        lease = self._lease() if self._lease else None
        if lease is None:
            raise LeaseLost("released")
        return lease

    async def hear_message(self, message: Message) -> None:
        if self.is_busy:
            await self.fail("busy", "The message before is still under way: wait, or cancel it.")
            return
        self._gives_up = False
        self._start(self._converse(message, self._ticket_for(message)))

    async def hear_cancel(self, message: Message) -> None:
        if not self.is_busy:
            await self.fail("idle", "There is nothing to cancel.")
        elif self._task is not None:
            self._gives_up = True
            self._task.cancel()

    def _ticket_for(self, message: Message) -> str:
        """What the client comes back with: in the message, or for the first one in the address."""
        if self._first_ticket is None:
            self._first_ticket = self.query("ticket")
        named, self._first_ticket = message.get("ticket") or self._first_ticket, ""
        return as_ticket(named)

    # -- One message, from the line to its end ------------------------------------------------

    async def _converse(self, message: Message, ticket: str) -> None:
        try:
            await self._answer(message, ticket)
        except asyncio.CancelledError:
            if not self._gives_up or self._is_over:
                raise
            await self._last_word({"type": "cancelled"})
        except NotReading:
            await self.hang_up(NOT_READING)
        except ClientLeft:
            pass
        except Refused as refusal:
            await self._last_word(messages.refused(refusal))
            if isinstance(refusal, ForeignTicket):
                await self.hang_up(FOREIGN_TICKET)
        except UnknownUpstream as error:
            logger.error("%s Add it in the admin, or name another on the consumer.", error)
            await self.fail("unknown_upstream", "There is no such upstream.", UNKNOWN_UPSTREAM)
        except Exception:
            logger.exception("A throttled chat failed")
            await self.fail("failed", "The reply failed.")

    async def _last_word(self, message: Message) -> None:
        try:
            await self.say(message, settings.START_GRACE)
        except NotReading:
            await self.hang_up(NOT_READING)
        except ClientLeft:
            pass

    async def _answer(self, message: Message, ticket: str) -> None:
        identity = await aidentify(self.caller(self.upstream))
        await aclose_old_connections()
        request = Request(self.upstream, identity, ticket=ticket, is_known=True)
        lease = await self._wait(AsyncWaiting(request))
        stream = AsyncLeasedStream(self.reply(message), lease)
        try:
            await self._stream(stream, lease)
        except asyncio.CancelledError as error:
            if not stream._was_stopped(error):  # by somebody else: the client has left or given up
                raise
        finally:
            await stream.aclose()
        if lease.lost:
            detail = "The slot of this request was taken back."
            await self.say(messages.error("lease_lost", detail, lost=lease.lost))
        else:
            await self.say(messages.done())

    async def _wait(self, waiting: AsyncWaiting) -> Lease:
        try:
            await waiting.begin()
            while waiting.lease is None:
                news = await waiting.next(settings.KEEP_ALIVE)
                if news is not None:
                    waiting.request.has_told = True
                    await self.say(messages.position(news), settings.START_GRACE)
            return waiting.take_lease()
        except BaseException:
            if self._gives_up:
                waiting.cancel()
            else:
                waiting.close()
            raise

    async def _stream(self, stream: AsyncLeasedStream, lease: Lease) -> None:
        self._lease = weakref.ref(lease)
        await self.say(messages.granted(lease), settings.START_GRACE)
        async for text in stream:
            await self.say(messages.token(text))


class QueuePositionConsumer(GuardedConsumer):
    """Shows a client its own tickets that wait, whatever request or worker they wait in.

    Those of its flow, where that is nobody else's, and those that it names: ``?ticket=`` or
    ``{"type": "watch", "ticket": ...}``, if they belong to its flow.
    """

    handlers = {"watch": "hear_watch"}  # noqa: RUF012 - a constant

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._subscription: Subscription | None = None
        self._upstream = ""
        self._flow = ""

    async def connect(self) -> None:
        await self.accept()
        self._start(self._watch())

    async def sees_flow(self, flow: str) -> bool:
        """Whether all that waits under this flow is the client's own business.

        A signed-in user's is; a guest's where it comes from the session, and not from an address
        that others share. Override it where your flows are organisations.
        """
        caller = self.caller(self._upstream)
        if caller.is_signed_in:
            return True
        without = {key: value for key, value in self.scope.items() if key != "session"}
        stranger = await aidentify(Caller(caller.upstream, caller.user, scope=without))
        return caller.session_key is not None and stranger.flow != flow

    async def hear_watch(self, message: Message) -> None:
        ticket, subscription = as_ticket(message.get("ticket")), self._subscription
        if not ticket:
            await self.fail("unknown_ticket", "This is not a ticket.")
        elif subscription is None:
            await self.fail("busy", "Not yet: the connection is being opened.")
        elif len(subscription.tickets) >= MAX_WATCHED:
            await self.fail("too_many_tickets", f"{MAX_WATCHED} at most.")
        else:
            subscription.add(ticket)

    async def _watch(self) -> None:
        try:
            await self._follow(self.scope["url_route"]["kwargs"]["upstream"])
        except NotReading:
            await self.hang_up(NOT_READING)
        except ClientLeft:
            pass
        except Exception:
            logger.exception("Watching positions failed")
            await self.fail("failed", "Positions cannot be shown.", 1011)

    async def _follow(self, upstream: str) -> None:
        self._upstream = upstream
        is_known = await Upstream.objects.filter(slug=upstream).aexists()
        if not is_known:
            await aclose_old_connections()
            await self.fail("unknown_upstream", "There is no such upstream.", UNKNOWN_UPSTREAM)
            return
        self._flow = (await aidentify(self.caller(upstream))).flow
        flow = self._flow if await self.sees_flow(self._flow) else ""
        await aclose_old_connections()
        alarm = TaskAlarm()
        subscription = watch(current().roster(upstream)).subscribe(alarm, flow=flow)
        self._subscription = subscription
        if ticket := as_ticket(self.query("ticket")):
            subscription.add(ticket)
        self._keep_alive_later()
        try:
            while not self._is_over:
                await alarm.wait(None)
                for news in subscription.take():
                    await self._tell(news, subscription)
        finally:
            subscription.close()

    async def _tell(self, news: News, subscription: Subscription) -> None:
        if isinstance(news, Left):
            subscription.remove(news.ticket)
            await self._tell_left(news)
        elif news.flow != self._flow:
            await self.fail("foreign_ticket", "This ticket is somebody else's.", FOREIGN_TICKET)
        else:
            await self.say(messages.position(news))

    async def _tell_left(self, news: Left) -> None:
        if not news.was_seen:
            await self.fail("unknown_ticket", "No such ticket waits (any more).")
            return
        kind = "granted" if news.is_granted else "left"
        await self.say({"type": kind, "ticket": news.ticket, "upstream": news.upstream})
