"""What a worker says to the waiting room: one small frozen type per verb (docs/protocol.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .policy import Policy


@dataclass(frozen=True, slots=True)
class Call:
    """Who speaks, when, and what it already knows.

    ``seq`` grows with everything the worker says; ``acked`` is the highest seq whose answer it
    has received, so that a store which forgot is found out; ``server`` names the store's server
    process, "" where unknown.
    """

    now_ms: int
    worker: str = ""
    seq: int = 0
    acked: int = 0
    server: str = ""


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Ask for a slot. ``wait_ms`` is the rest of the wait budget, None = the tier's whole one."""

    verb: ClassVar[str] = "enqueue"
    ticket: str
    tier: str
    flow: str
    wait_ms: int | None = None
    is_known: bool = False  # the client knows its ticket and may come back with it


@dataclass(frozen=True, slots=True)
class Confirm:
    """The calls of these granted tickets have started."""

    verb: ClassVar[str] = "confirm"
    tickets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """The call has ended. After an abnormal end the slot drains before it is handed on."""

    verb: ClassVar[str] = "release"
    ticket: str
    is_abnormal: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    """Leave the queue, or give back a grant whose call never started.

    ``keep_place``: the client may come back within the grace. ``has_expired``: the wait budget
    is over, so the answer says when to come back.
    """

    verb: ClassVar[str] = "cancel"
    ticket: str
    keep_place: bool = False
    has_expired: bool = False


@dataclass(frozen=True, slots=True)
class Attach:
    """Take over a waiting or away ticket of the same flow, at its place."""

    verb: ClassVar[str] = "attach"
    ticket: str
    flow: str


@dataclass(frozen=True, slots=True)
class Revoke:
    """End a lease. Forced, the slot is free before the call has ended."""

    verb: ClassVar[str] = "revoke"
    ticket: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class HeldTicket:
    """What a worker says of a slot it holds; enough to rebuild it."""

    ticket: str
    tier: str
    flow: str
    held_ms: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A worker's sign of life: what it holds, how many wait, what it heard last.

    ``ack`` is the seq of the last beat whose reply it has read; ``seen`` the workers that reply
    named; ``label`` is for operators (host and process id).
    """

    verb: ClassVar[str] = "beat"
    held: tuple[HeldTicket, ...] = ()
    waiting: int = 0
    ack: int = 0
    seen: tuple[str, ...] = ()
    label: str = ""


@dataclass(frozen=True, slots=True)
class WaitingTicket:
    """What a worker says of a request that waits; enough to put it back at its place."""

    ticket: str
    tier: str
    flow: str
    waited_ms: int
    left_ms: int
    seq: int
    is_known: bool = False


@dataclass(frozen=True, slots=True)
class Reassert:
    """All of a worker's waiting tickets with ``after`` < ticket <= ``upto``, in ticket order."""

    verb: ClassVar[str] = "reassert"
    waiting: tuple[WaitingTicket, ...]
    after: str = ""
    upto: str = "~"
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class Positions:
    """Where these tickets stand, and all tickets of these flows."""

    verb: ClassVar[str] = "positions"
    tickets: tuple[str, ...]
    flows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing new: expire and dispatch what is due."""

    verb: ClassVar[str] = "tick"


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """The operator's decision; a higher version wins."""

    verb: ClassVar[str] = "set_policy"
    policy: Policy


@dataclass(frozen=True, slots=True)
class SignOff:
    """The worker leaves for good."""

    verb: ClassVar[str] = "sign_off"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is going on, for operators."""

    verb: ClassVar[str] = "snapshot"


Command = (
    Enqueue
    | Confirm
    | Release
    | Cancel
    | Attach
    | Revoke
    | Beat
    | Reassert
    | Positions
    | Tick
    | SetPolicy
    | SignOff
    | Snapshot
)
