"""The two twins side by side: the same commands in, the same answers and books expected."""

from __future__ import annotations

import importlib
import itertools
import json
import shutil
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import llm_throttle.scheduling
from llm_throttle.backends import script
from llm_throttle.scheduling.commands import Call, Command
from llm_throttle.scheduling.decisions import Reply
from llm_throttle.scheduling.recovery import Timing

PACKAGE = Path(llm_throttle.scheduling.__file__).parent
VIEW = Path(__file__).with_name("view.lua").read_text()

Edits = Mapping[str, Iterable[tuple[str, str]]]
"""Substitutions by file name: each text must occur."""

_numbers = itertools.count()


class Difference(AssertionError):
    """The twins do not agree."""


def edited(text: str, edits: Iterable[tuple[str, str]]) -> str:
    for old, new in edits:
        if old not in text:
            raise LookupError(f"{old!r} does not occur (any more)")
        text = text.replace(old, new)
    return text


def load_scheduler(edits: Edits) -> Any:
    """A copy of the pure scheduler with some of its text replaced."""
    with tempfile.TemporaryDirectory() as folder:
        name = f"edited_scheduling_{next(_numbers)}"
        shutil.copytree(PACKAGE, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        for file, substitutions in edits.items():
            path = Path(folder, name, file)
            path.write_text(edited(path.read_text(), substitutions))
        sys.path.insert(0, folder)
        try:
            return importlib.import_module(f"{name}.scheduler").Scheduler
        finally:
            sys.path.remove(folder)


class Twins:
    """A Scheduler and a script on a fresh upstream; ``do`` fails where they differ."""

    def __init__(self, client: Any, timing: Timing, scheduler: Any, source: str) -> None:
        self.timing = timing
        self.commands = 0
        self.log: list[tuple[Call, Command]] = []
        self.seen: Counter[str] = Counter()
        self._make = lambda: scheduler(timing=timing)
        self.scheduler = self._make()
        self._client = client
        self._source = edited(source, [("\nreturn main()\n", "\n" + VIEW)])
        self._sha = client.script_load(self._source)
        self.keys = script.keys("test", f"upstream {uuid.uuid4()}")

    def do(self, call: Call, command: Command) -> Reply:
        self.commands += 1
        self.log.append((call, command))
        expected = self.scheduler.apply(call, command)
        if self.scheduler.is_abandoned:
            self.scheduler = self._make()
        arguments = script.encode(call, command, self.timing)
        raw, books = self._client.evalsha(self._sha, len(self.keys), *self.keys, *arguments)
        found = script.decode(raw, command)
        self._compare(command, expected, found, _readable(json.loads(books)))
        self.seen[type(found.answer).__name__ + getattr(found.answer, "reason", "")] += 1
        self.seen.update(f"notice {n.kind} {n.reason}" for n in found.notices)
        self.seen["has_more"] += found.has_more
        return found

    def forget(self) -> None:
        """Let both lose everything."""
        self.scheduler = self._make()
        self._client.delete(*self.keys)

    def close(self) -> None:
        self._client.delete(*self.keys)

    def _compare(self, command: Command, expected: Any, found: Reply, books: Any) -> None:
        # By text, because an edited copy has classes of its own.
        if str(expected) != str(found):
            raise Difference(f"{command}\n  scheduler.py:  {expected}\n  scheduler.lua: {found}")
        own = view(self.scheduler)
        if own and books:  # the script cuts its list off only now and then
            recent = books["holds"].pop()
            books["holds"].append(recent[-len(own["holds"][-1]) :] if own["holds"][-1] else [])
        if own != books:
            raise Difference(f"{command}\n" + "\n".join(_differences(own, books)))


def view(scheduler: Any) -> Any:
    """All that the scheduler remembers, in the shape in which ``view.lua`` shows the store's."""
    ledger, workforce = scheduler.ledger, scheduler.workforce
    if scheduler.is_new:
        return None
    holds, recovery, policy = ledger.holds, workforce.recovery, ledger.policy
    return {
        "clock": [
            ledger.now,
            scheduler.offset,
            scheduler.server,
            scheduler.shares.passed,
            workforce.judge_at,
            scheduler.forecast.edited_at,
            ledger.in_flight,
            ledger.away,
            sum(len(tier.queue) for tier in ledger.tiers.values()),
        ],
        "removed": policy and len(set(ledger.tiers) - set(policy.by_slug)),
        "written_as": 1,
        "sizes": [
            len(ledger.tickets),
            len(ledger.timers),
            len(ledger.owned),
            len(ledger.flows),
            len(ledger.workers),
        ],
        "recovery": recovery and [recovery.since, sorted(recovery.awaited), sorted(recovery.heard)],
        "policy": policy and _policy(policy),
        "holds": [
            holds.count,
            holds.p10,
            holds.p50,
            holds.scaled_mean,
            holds.measured,
            holds.refreshed_at,
            [f"{at}:{held}" for at, held in holds.recent],
        ],
        "tiers": {slug: _tier(t, slug, policy) for slug, t in ledger.tiers.items()},
        "queues": {
            slug: [tier.queue[rank].id for rank in range(len(tier.queue))]
            for slug, tier in ledger.tiers.items()
        },
        "queued": sum(len(tier.queue) for tier in ledger.tiers.values()),
        "tickets": {id: _ticket(ticket) for id, ticket in ledger.tickets.items()},
        "timers": [part for due_at, id in ledger.timers for part in (id, str(due_at))],
        "owned": ["!".join(item) for item in ledger.owned],
        "flows": {id: [f.held, f.lines, f.away] for id, f in ledger.flows.items()},
        "workers": {id: _worker(worker) for id, worker in ledger.workers.items()},
    }


def _policy(p: Any) -> list[Any]:
    limits = [p.capacity, p.queue_depth, p.max_hold_ms, p.drain_ms, p.grace_ms, p.is_paused]
    reserved, slugs = sum(tier.reserved for tier in p), [tier.slug for tier in p]
    return [p.version, p.digest, *limits, reserved, slugs]


def _tier(t: Any, slug: str, policy: Any) -> list[Any]:
    queue, rate = t.queue, t.rate
    counts = [t.passed, t.in_flight, t.waiting, len(queue), queue.in_line, queue.turn]
    state = [*counts, t.return_at, rate.bucket, rate.first_at, *rate.counts]
    if policy is None or slug not in policy.by_slug:
        return [*state, False]
    limits = policy.by_slug[slug]
    depths = [limits.wait_budget_ms, limits.queue_depth, limits.depth_per_user]
    usable = policy.usable_slots(slug)
    return [*state, limits.cap, limits.reserved, limits.weight, *depths, usable]


def _ticket(t: Any) -> list[Any]:
    """What can still matter of a ticket in its state; the script keeps no more."""
    parts = [str(t.state), t.worker, t.seq, t.due_at]
    if parts[0] == "ended":
        return parts
    parts += [t.tier, t.flow]
    if parts[0] in ("waiting", "parked", "away"):
        order = [t.order_at, t.order_worker, t.order_seq, t.turn, t.lap]
        return [*parts, *order, t.deadline_at, t.is_known]
    return [*parts, t.granted_at, t.is_confirmed, t.named_in]


def _worker(w: Any) -> list[Any]:
    seqs = [w.seq, w.beat_seq, w.past_beat_seq, w.mismatches]
    return [w.beat_at, w.label, *seqs, w.is_suspect, w.is_dead, w.has_left, w.has_parked]


def _readable(books: Any) -> Any:
    """Sets in order, and false where Lua has no null."""
    if books is None:
        return None
    recovery = books["recovery"]
    books["recovery"] = recovery and [recovery[0], sorted(recovery[1]), sorted(recovery[2])]
    for name in ("recovery", "policy", "removed"):
        books[name] = None if books[name] is False else books[name]
    return books


def _differences(own: Any, books: Any, path: str = "") -> Iterable[str]:
    if isinstance(own, dict) and isinstance(books, dict):
        for name in sorted({*own, *books}):
            if own.get(name) != books.get(name):
                yield from _differences(own.get(name), books.get(name), f"{path}.{name}")
    else:
        yield f"  {path.removeprefix('.')}\n    scheduler.py:  {own}\n    scheduler.lua: {books}"


CONSTANTS = {
    "estimates.py": {
        "MAX_HOLDS": ("64", "4"),
        "HOLD_MEMORY_MS": ("300_000", "20_000"),
        "MEAN_OVER": ("128", "4"),
        "MIN_HOLDS": ("20", "2"),
        "MIN_GRANTS": ("5", "2"),
    },
    "ledger.py": {"MAX_AWAY_UNBOUNDED": ("100", "1")},
    "forecast.py": {"SAMPLES": ("16", "2"), "FEW_HOLDS": ("5", "2")},
    "shares.py": {"REBASE_AT": ("2**50", "2**28"), "REBASE_TO": ("2**42", "2**26")},
    "workforce.py": {"SWEEP": ("64", "2"), "FORGET_AFTER": ("30", "2")},
    "scheduler.py": {
        "MAX_GRANTS": ("64", "2"),
        "MAX_PASSED_OVER": ("32", "2"),
        "MAX_HOLDERS": ("256", "2"),
    },
}
"""Bounds that a short story never reaches, and values that it does."""


def narrow_edits() -> dict[str, list[tuple[str, str]]]:
    return {
        file: [(f"\n{name} = {old}\n", f"\n{name} = {new}\n") for name, (old, new) in group.items()]
        for file, group in CONSTANTS.items()
    }


def narrow_source(source: str) -> str:
    """The script with the same bounds narrowed as ``narrow_edits`` does."""
    return edited(
        source,
        (
            (f"local {name} = {_in_lua(old)}\n", f"local {name} = {_in_lua(new)}\n")
            for group in CONSTANTS.values()
            for name, (old, new) in group.items()
        ),
    )


def _in_lua(number: str) -> str:
    return number.replace("_", "").replace("**", " ^ ")
