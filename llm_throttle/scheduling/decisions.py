"""What the waiting room answers: small frozen types, told apart by type, the reason inside."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Granted:
    """A slot is yours now."""

    ticket: str


@dataclass(frozen=True, slots=True)
class Queued:
    """You wait; ``ahead`` of your tier go first, for ``wait_ms`` at the longest."""

    ticket: str
    ahead: int
    wait_ms: int


@dataclass(frozen=True, slots=True)
class Refused:
    """No, with the reason. ``retry_ms`` is an estimate in milliseconds, 0 = none was made."""

    reason: str
    retry_ms: int = 0


@dataclass(frozen=True, slots=True)
class Gone:
    """The store does not count these tickets as the caller's (any more)."""

    tickets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """It is so. ``after_ms``: when a drained slot is handed on, or an expired waiter may return."""

    after_ms: int = 0


@dataclass(frozen=True, slots=True)
class NeedPolicy:
    """No policy is known here: publish it and ask again."""


@dataclass(frozen=True, slots=True)
class PolicyStamp:
    """The policy in force; ``is_current`` is False where yours was older or differs."""

    version: int
    digest: str
    is_current: bool


@dataclass(frozen=True, slots=True)
class BeatReply:
    """What the owner did not know. ``number`` is acknowledged by the next beat.

    ``granted``: slots of yours that you did not list. ``revoked``: end these. ``gone``: not yours.
    ``lost``: you were taken for dead; these count again, beside what was let in meanwhile.
    """

    number: int
    granted: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    wants_waiting: bool = False
    workers: tuple[str, ...] = ()
    version: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a waiter stands, and an estimate of its wait: from ``low_ms`` to ``high_ms``."""

    ticket: str
    flow: str
    ahead: int
    low_ms: int
    high_ms: int


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tickets asked for stand; ``granted`` are those that hold a slot.

    ``version`` is the policy's in force: places may move back when it changes or in recovery.
    """

    places: tuple[Place, ...]
    granted: tuple[str, ...] = ()
    version: int = 0
    is_recovering: bool = False


@dataclass(frozen=True, slots=True)
class TierCount:
    tier: str
    in_flight: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Holder:
    ticket: str
    tier: str
    flow: str
    worker: str
    state: str
    held_ms: int


@dataclass(frozen=True, slots=True)
class WorkerCount:
    worker: str
    label: str
    state: str
    silent_ms: int
    in_flight: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Overview:
    """One upstream at one instant. ``holders`` is cut off at ``MAX_HOLDERS``."""

    capacity: int
    version: int
    digest: str
    in_flight: int
    waiting: int
    is_recovering: bool
    tiers: tuple[TierCount, ...]
    holders: tuple[Holder, ...]
    workers: tuple[WorkerCount, ...]


Answer = (
    Granted
    | Queued
    | Refused
    | Gone
    | Done
    | NeedPolicy
    | PolicyStamp
    | BeatReply
    | Places
    | Overview
)


@dataclass(frozen=True, slots=True)
class Notice:
    """News for the owner of a ticket: ``granted``, ``refused``, ``revoked`` or ``moved``."""

    worker: str
    kind: str
    ticket: str
    reason: str = ""
    retry_ms: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, the news it caused, and whether bounded work was left over for a ``tick``."""

    answer: Answer
    notices: tuple[Notice, ...] = field(default=())
    has_more: bool = False
