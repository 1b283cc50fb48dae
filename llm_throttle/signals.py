"""What happened, for those who want to know: metrics, logs, other apps.

Each event signal is sent with ``send_robust`` and one keyword argument ``event``, an ``Event``.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.dispatch import Signal


@dataclass(frozen=True, slots=True)
class Event:
    """What a listener may know about one request. Durations are milliseconds.

    ``reason`` says why it was refused, why the lease was lost or why it did not end normally;
    "" where all went well.
    """

    upstream: str
    ticket: str
    tier: str
    reason: str = ""
    waited_ms: int = 0
    held_ms: int = 0


policy_edited = Signal()
"""An edit of an upstream's policy was committed: ``upstream`` (slug), ``deleted``, ``version``."""

granted = Signal()
"""A request got a slot, at once or after ``waited_ms``."""

refused = Signal()
"""A request was refused for ``reason`` after ``waited_ms``."""

released = Signal()
"""A slot was given back after ``held_ms``."""

lease_lost = Signal()
"""A worker lost a slot while its call was running, for ``reason``."""

reported = Signal()
"""The provider answered a call: ``status`` and ``retry_after`` come beside the event."""
