"""The ticket that a client comes back with."""

from __future__ import annotations

import re
from typing import Any

TICKET = re.compile(r"[0-9a-f]{32}")


def ticket_of(request: Any) -> str:
    """The ticket that a client comes back with, "" where there is none.

    In the header, in the query, or where ``EventSource`` puts it when it reconnects.
    """
    headers = request.headers
    named = headers.get("X-LLM-Throttle-Ticket") or request.GET.get("ticket")
    return as_ticket(named or headers.get("Last-Event-ID"))


def as_ticket(text: object) -> str:
    """The text if it looks like a ticket, else ""."""
    return text if isinstance(text, str) and TICKET.fullmatch(text) else ""
