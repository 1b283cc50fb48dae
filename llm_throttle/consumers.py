"""Chats and queue positions over WebSocket (docs/howto/waiting_clients.md has the messages).

A connection's tasks end with the call that serves it, and a lease with whoever uses it.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from channels.db import aclose_old_connections
from django.core.exceptions import ImproperlyConfigured

from . import messages
from .alarms import TaskAlarm
from .conf import settings
from .exceptions import ForeignTicket, LeaseLost, Refused, UnknownUpstream
from .identity import Caller, aidentify
from .lease import Lease
from .messages import Message
from .models import Upstream
from .positions import Left, News
from .request import Request
from .sockets import (
    FOREIGN_TICKET,
    NOT_READING,
    UNKNOWN_UPSTREAM,
    ClientLeft,
    GuardedConsumer,
    NotReading,
)
from .streaming import AsyncLeasedStream
from .tickets import as_ticket
from .waiting import AsyncWaiting
from .watching import Subscription, watch
from .worker import current

logger = logging.getLogger(__name__)

MAX_WATCHED = 16
"""Tickets that one client may name; a user seldom has more requests at once."""


class ThrottledChatConsumer(GuardedConsumer, ABC):
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

    @abstractmethod
    def reply(self, message: Message) -> AsyncIterator[str]:
        """The reply to a message, text by text. It is closed when the client leaves."""

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
            await self.say(messages.lease_lost(lease))
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
