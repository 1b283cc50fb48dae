"""What clients are told, the same over every transport: one builder per message.

A message is a JSON object with a ``type``. As a server-sent event it is the data of an event of
the same name (docs/howto/waiting_clients.md lists them all).
"""

from __future__ import annotations

import json
from typing import Any

from .exceptions import Refused
from .lease import Lease
from .positions import Position

Message = dict[str, Any]


def position(news: Position) -> Message:
    """Where a waiter stands; ``cause`` only where it moved back."""
    message = {
        "type": "position",
        "ticket": news.ticket,
        "upstream": news.upstream,
        "position": news.position,
        "ahead": news.ahead,
        "eta": list(news.eta),
    }
    return message | {"cause": news.cause} if news.cause else message


def granted(lease: Lease) -> Message:
    return {
        "type": "granted",
        "ticket": lease.ticket,
        "upstream": lease.upstream,
        "tier": lease.tier,
        "waited_ms": int(lease.waited * 1000),
    }


def refused(refusal: Refused) -> Message:
    """The problem's fields; its ``type`` is a message's here."""
    return refusal.as_problem() | {"type": "refused"}


def token(text: str) -> Message:
    return {"type": "token", "text": text}


def done() -> Message:
    return {"type": "done"}


def error(code: str, detail: str, **more: Any) -> Message:
    return {"type": "error", "code": code, "detail": detail, **more}


def lease_lost(lease: Lease) -> Message:
    return error("lease_lost", "The slot of this request was taken back.", lost=lease.lost)


# As server-sent events


def as_event(message: Message, *, id: str | None = None, retry_s: int | None = None) -> bytes:
    """A message as a server-sent event. ``id`` is what ``EventSource`` reconnects with."""
    lines = [f"event: {message['type']}", f"data: {json.dumps(message)}"]
    if id is not None:
        lines.append(f"id: {id}")
    if retry_s is not None:
        lines.append(f"retry: {retry_s * 1000}")
    return ("\n".join(lines) + "\n\n").encode()


def position_event(news: Position) -> bytes:
    return as_event(position(news), id=news.ticket)


def refused_event(refusal: Refused) -> bytes:
    """The last event. Where the ticket has moved, the client must not come back with it."""
    id = "" if refusal.reason == "moved" else None
    return as_event(refused(refusal), id=id, retry_s=refusal.retry_after)
