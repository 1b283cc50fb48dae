"""What goes to ``scheduler.lua`` and what comes back: commands to arguments, answers to replies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, singledispatch
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from llm_throttle.scheduling import commands, decisions
from llm_throttle.scheduling.commands import Call, Command
from llm_throttle.scheduling.decisions import Answer, Notice, Reply
from llm_throttle.scheduling.recovery import Timing

SOURCE = files(__package__).joinpath("scheduler.lua").read_text(encoding="utf-8")

STATE_KEYS = ("core", "tickets", "queue", "timers", "owned", "flows", "workers", "holds")
"""The keys of an upstream's state, in the order in which the script takes them."""

SEPARATOR = "!"
"""Between the parts of a notice in an inbox: in no kind or reason."""

Argument = str | int


# -- Keys -----------------------------------------------------------------------------------------


def keys(prefix: str, slug: str, worker_ids: Iterable[str] = ()) -> list[str]:
    """All keys of one upstream: its state, then the inboxes of the workers named."""
    return [*_state_keys(prefix, slug), *(inbox_key(prefix, slug, id) for id in worker_ids)]


def inbox_key(prefix: str, slug: str, worker: str) -> str:
    """The list that brings a worker its news from one upstream."""
    return f"{_base(prefix, slug)}inbox:{_quote(worker)}"


@lru_cache
def _state_keys(prefix: str, slug: str) -> tuple[str, ...]:
    base = _base(prefix, slug)
    return tuple(base + name for name in STATE_KEYS)


def _base(prefix: str, slug: str) -> str:
    """What all keys of one upstream begin with, and those of no other.

    The braces are the only ones in a key, and never empty, so a cluster hashes what is between
    them: the slug. The prefix stays readable, because operators write access rules for it.
    """
    start = _quote(prefix, safe=":") + ":" if prefix else ""
    return f"{start}{{llm_throttle:{_quote(slug)}}}:"


def _quote(text: str, safe: str = "") -> str:
    return quote(text, safe=safe, errors="surrogatepass")


# -- Arguments ------------------------------------------------------------------------------------


def encode(
    call: Call, command: Command, timing: Timing, worker_ids: Sequence[str] = ()
) -> list[Argument]:
    """The arguments of one run; ``worker_ids`` are those whose inboxes are among the keys."""
    return [
        command.verb,
        call.now_ms,
        call.worker,
        call.seq,
        call.acked,
        call.server,
        timing.beat_ms,
        timing.worker_ttl_ms,
        timing.recovery_ms,
        timing.blind_ms,
        *worker_ids,
        *_arguments(command),
    ]


@singledispatch
def _arguments(command: Command) -> Iterator[Argument]:
    """What the verb takes, flat. Most common first; ``scheduler.lua`` names the parts."""
    yield from ()


@_arguments.register
def _(command: commands.Enqueue) -> Iterator[Argument]:
    yield command.ticket
    yield command.tier
    yield command.flow
    yield "" if command.wait_ms is None else command.wait_ms
    yield int(command.is_known)


@_arguments.register
def _(command: commands.Confirm) -> Iterator[Argument]:
    yield from command.tickets


@_arguments.register
def _(command: commands.Positions) -> Iterator[Argument]:
    yield len(command.tickets)
    yield from command.tickets
    yield from command.flows


@_arguments.register
def _(command: commands.Release) -> Iterator[Argument]:
    yield command.ticket
    yield int(command.is_abnormal)


@_arguments.register
def _(command: commands.Cancel) -> Iterator[Argument]:
    yield command.ticket
    yield int(command.keep_place)
    yield int(command.has_expired)


@_arguments.register
def _(command: commands.Attach) -> Iterator[Argument]:
    yield command.ticket
    yield command.flow


@_arguments.register
def _(command: commands.Revoke) -> Iterator[Argument]:
    yield command.ticket
    yield int(command.force)


@_arguments.register
def _(command: commands.Beat) -> Iterator[Argument]:
    yield command.waiting
    yield command.ack
    yield command.label
    yield len(command.held)
    for item in command.held:
        yield from (item.ticket, item.tier, item.flow, item.held_ms)
    yield from command.seen


@_arguments.register
def _(command: commands.Reassert) -> Iterator[Argument]:
    yield command.after
    yield command.upto
    yield int(command.is_last)
    for item in command.waiting:
        yield from (item.ticket, item.tier, item.flow)
        yield from (item.waited_ms, item.left_ms, item.seq, int(item.is_known))


@_arguments.register
def _(command: commands.SetPolicy) -> Iterator[Argument]:
    policy = command.policy
    yield from (policy.version, policy.digest, policy.capacity, policy.queue_depth)
    yield from (policy.max_hold_ms, policy.drain_ms, policy.grace_ms, int(policy.is_paused))
    for tier in policy:
        yield from (tier.slug, tier.cap, tier.reserved, tier.weight, tier.wait_budget_ms)
        yield from (tier.queue_depth, tier.depth_per_user, policy.usable_slots(tier.slug))


# -- Answers --------------------------------------------------------------------------------------


def decode(raw: Sequence[Any], command: Command | None = None) -> Reply:
    """The reply that the script's answer stands for, be it in bytes or in text."""
    kind, has_more, news, *rest = _texts(raw)
    notices = tuple(Notice(*part) for part in _parts(news, 5))
    return Reply(_answer(kind, rest), notices, bool(has_more))


def _answer(kind: str, rest: list[Any]) -> Answer:
    match kind:
        case "granted":
            return decisions.Granted(*rest)
        case "queued":
            return decisions.Queued(*rest)
        case "refused":
            return decisions.Refused(*rest)
        case "gone":
            return decisions.Gone(tuple(rest))
        case "done":
            return decisions.Done(*rest)
        case "need_policy":
            return decisions.NeedPolicy()
        case "policy_stamp":
            version, digest, is_current = rest
            return decisions.PolicyStamp(version, digest, bool(is_current))
        case "places":
            return _places(*rest)
        case "beat_reply":
            return _beat_reply(*rest)
        case "overview":
            return _overview(*rest)
    raise ValueError(f"The script answered {kind!r}, which this version does not know.")


def _places(
    places: list[Any], granted: list[str], version: int, is_recovering: int
) -> decisions.Places:
    found = tuple(decisions.Place(*part) for part in _parts(places, 5))
    return decisions.Places(found, tuple(granted), version, bool(is_recovering))


def _beat_reply(
    number: int, wants_waiting: int, version: int, digest: str, *lists: list[str]
) -> decisions.BeatReply:
    granted, revoked, gone, lost, workers = map(tuple, lists)
    return decisions.BeatReply(
        number, granted, revoked, gone, lost, bool(wants_waiting), workers, version, digest
    )


def _overview(
    capacity: int,
    version: int,
    digest: str,
    in_flight: int,
    waiting: int,
    is_recovering: int,
    tiers: list[Any],
    holders: list[Any],
    workers: list[Any],
) -> decisions.Overview:
    return decisions.Overview(
        capacity,
        version,
        digest,
        in_flight,
        waiting,
        bool(is_recovering),
        tuple(decisions.TierCount(*part) for part in _parts(tiers, 3)),
        tuple(decisions.Holder(*part) for part in _parts(holders, 6)),
        tuple(decisions.WorkerCount(*part) for part in _parts(workers, 6)),
    )


def _texts(raw: Sequence[Any]) -> list[Any]:
    """The same with text for bytes, at any depth; integers stay."""
    return [_text(item) for item in raw]


def _text(item: Any) -> Any:
    if isinstance(item, bytes):
        return item.decode()
    return _texts(item) if isinstance(item, list) else item


def _parts(flat: list[Any], size: int) -> Iterator[list[Any]]:
    return (flat[start : start + size] for start in range(0, len(flat), size))


# -- Inboxes --------------------------------------------------------------------------------------


def encode_notice(notice: Notice) -> str:
    """A notice as the script leaves it in an inbox."""
    return SEPARATOR.join((notice.kind, notice.ticket, notice.reason, str(notice.retry_ms)))


def decode_notice(raw: bytes | str, worker: str) -> Notice:
    """An item from a worker's inbox."""
    text = raw.decode() if isinstance(raw, bytes) else raw
    kind, rest = text.split(SEPARATOR, 1)
    ticket, reason, retry_ms = rest.rsplit(SEPARATOR, 2)
    return Notice(worker, kind, ticket, reason, int(retry_ms))
