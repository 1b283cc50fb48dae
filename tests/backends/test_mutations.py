"""The comparison of the twins notices every one of these slips, in either of them.

Each is a change of text. One whose text has gone fails its test, so that the list stays true when
the scheduler changes.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis

from llm_throttle.backends import script
from llm_throttle.scheduling.scheduler import Scheduler

from .scenario import TIMINGS, Scenario, tell
from .twins import Difference, Twins, edited, load_scheduler, narrow_edits, narrow_source

STORIES = 40
LENGTH = 250

LUA = {
    "a reservation is broken into": ("return free > reserved\n", "return free >= reserved\n"),
    "a cap is passed by one": ("tier.in_flight >= tier.cap", "tier.in_flight > tier.cap"),
    "a reservation gives no right": ("if tier.in_flight < tier.reserved then", "if false then"),
    "a late tier is not lifted": ("room.passed = math.max(tier.passed, room.passed)", ""),
    "every grant lifts": ("if room.is_contested then", "if true then"),
    "the lift comes after the increment": (
        "      room.record_grant(tier, room.now)",
        "      room.passed = tier.passed\n      room.record_grant(tier, room.now)",
    ),
    "ties go to the lighter tier": ("tier.weight > best.weight", "tier.weight < best.weight"),
    "an edited weight counts late": (
        "tier.passed = math.min(tier.passed, room.passed + math.floor(SCALE / tier.weight))",
        "",
    ),
    "nothing drains": ("room.give_back(ticket, is_abnormal)", "room.give_back(ticket, false)"),
    "a user may have one more": (">= tier.depth_per_user", "> tier.depth_per_user"),
    "away tickets count for their user": ("#flow.held - #flow.away", "#flow.held"),
    "no tombstone for the unknown": (
        "        room.bar(id, call.worker, call.seq)\n        return",
        "        return",
    ),
    "a tombstone goes one beat early": (
        "worker.past_beat_seq >= tombstone.seq",
        "worker.beat_seq >= tombstone.seq",
    ),
    "who cancels leaves a gap behind": (
        "fair_queue._assign(tier, line, places, index)\n      tier.in_line = tier.in_line - 1",
        "tier.in_line = tier.in_line - 1",
    ),
    "the laps are swapped": ("FIRST_LAP, SECOND_LAP = 0, 1", "FIRST_LAP, SECOND_LAP = 1, 0"),
    "who was served does not catch up": (".turn <= tier.turn then", ".turn < 0 then"),
    "a user's arrivals are not in order": ("one.order_at > other.order_at", "false"),
    "a deadline is passed by an instant": (
        '"-inf", room.now, "LIMIT"',
        '"-inf", "(" .. room.now, "LIMIT"',
    ),
    "slots are given in recovery": (
        "policy.is_paused or room.recovery then",
        "policy.is_paused then",
    ),
    "recovery waits for nobody": ("is_over = is_over and recovery.heard[id]", ""),
    "slots are given in a pause": ("not policy or policy.is_paused or", "not policy or"),
    "an old beat is heard": ("if call.seq <= worker.beat_seq then", "if false then"),
    "a late request is heard": (
        "return worker.is_dead or call.seq <= worker.beat_seq",
        "return false",
    ),
    "newer tickets are taken for lost": (
        "(listed[ticket.id] or ticket.seq > call.seq)",
        "listed[ticket.id]",
    ),
    "nobody hears of a grant": ('room.books.tell(ticket, "granted")', ""),
    "nobody hears of a move": ('room.books.tell(ticket, "moved")', ""),
    "the silent are granted": ("elseif room.is_silent(ticket.worker) then", "elseif false then"),
    "the silent keep unconfirmed grants": ("and not ticket.is_confirmed then", "and false then"),
    "a named grant is passed on too early": ("and beat.ack >= ticket.named_in", ""),
    "a worker dies an instant late": (
        "silent >= room.worker_ttl_ms",
        "silent > room.worker_ttl_ms",
    ),
    "the dead keep no places": ("not (ticket.is_known and room", "not (false and room"),
    "parked tickets stay parked": ("room.line.make_ready(parked[i])", ""),
    "a clock set back goes unnoticed": ("room.offset = room.offset + room.now - now", ""),
    "another server goes unnoticed": ("if known ~= room.server and known", "if false and known"),
    "a store that is behind goes unnoticed": ("and room.is_behind(call))", "and false)"),
    "the queue takes one more": (
        "room.books.waiting() >= policy.queue_depth",
        "room.books.waiting() > policy.queue_depth",
    ),
    "a wait outlasts the tier's budget": ("math.min(tier.wait_budget_ms, math.max", "(math.max"),
    "too many are away": ("math.floor(bound / 4)", "math.floor(bound / 2)"),
    "the grace outlasts the deadline": ("math.min(ticket.deadline_at, since", "(since"),
    "a crowd is told one time": ("tier.waiting * gap) + gap", "tier.waiting * gap)"),
    "the median passes for the tenth": ("#holds * 10 / 100", "#holds * 50 / 100"),
    "grants are never forgotten": ("math.min(bucket - tier.bucket, BUCKETS)", "0"),
    "deleted tiers keep their waiters": ("math.min(tier.ready, left)", "0"),
    "anybody may confirm": (
        "if ticket.worker ~= call.worker then\n        return false",
        "if false then\n        return false",
    ),
    "a stranger's ticket is attached": ("or ticket.flow ~= flow then", "then"),
    "an older policy wins": ("version > in_force.version", "version ~= in_force.version"),
}

PYTHON = {
    "a reservation is broken into": ("shares.py", "or free > sum(", "or free >= sum("),
    "a cap is passed by one": ("shares.py", "held >= tier.cap", "held > tier.cap"),
    "a reservation gives no right": ("shares.py", "return held < tier.reserved or", "return"),
    "a late tier is not lifted": (
        "shares.py",
        "self.passed = max(state.passed, self.passed)",
        "pass",
    ),
    "every grant lifts": ("shares.py", "if self.is_contested:", "if True:"),
    "the lift comes after the increment": (
        "shares.py",
        "        state.rate.record(",
        "        self.passed = state.passed\n        state.rate.record(",
    ),
    "ties go to the lighter tier": ("shares.py", "-tier.weight, index", "tier.weight, index"),
    "an edited weight counts late": ("shares.py", "state.passed = min(state.passed,", "_ = (0,"),
    "nothing drains": ("scheduler.py", "drain=command.is_abnormal", "drain=False"),
    "a user may have one more": ("scheduler.py", ">= tier.depth_per_user", "> tier.depth_per_user"),
    "away tickets count for their user": ("records.py", "- len(self.away)", ""),
    "no tombstone for the unknown": (
        "scheduler.py",
        "            ledger.bar(command.ticket, call.worker, call.seq)\n            return",
        "            return",
    ),
    "a tombstone goes one beat early": (
        "ledger.py",
        "worker.past_beat_seq >= tombstone.seq",
        "worker.beat_seq >= tombstone.seq",
    ),
    "who cancels leaves a gap behind": (
        "fair_queue.py",
        "self._assign(line, places[:-1], index)",
        "",
    ),
    "the laps are swapped": (
        "fair_queue.py",
        "FIRST_LAP, SECOND_LAP = 0, 1",
        "FIRST_LAP, SECOND_LAP = 1, 0",
    ),
    "who was served does not catch up": ("fair_queue.py", ".turn <= self.turn:", ".turn < 0:"),
    "a user's arrivals are not in order": ("fair_queue.py", "while index and", "while False and"),
    "a deadline is passed by an instant": (
        "scheduler.py",
        'up_to((ledger.now, "~")',
        'up_to((ledger.now - 1, "~")',
    ),
    "slots are given in recovery": (
        "scheduler.py",
        "policy.is_paused or self.workforce.recovery:",
        "policy.is_paused:",
    ),
    "recovery waits for nobody": ("recovery.py", " and self.awaited <= self.heard", ""),
    "slots are given in a pause": (
        "scheduler.py",
        "policy is None or policy.is_paused or",
        "policy is None or",
    ),
    "an old beat is heard": ("workforce.py", "if call.seq <= worker.beat_seq:", "if False:"),
    "a late request is heard": (
        "workforce.py",
        "return worker.is_dead or call.seq <= worker.beat_seq",
        "return False",
    ),
    "newer tickets are taken for lost": (
        "workforce.py",
        "in listed or ticket.seq > call.seq:",
        "in listed:",
    ),
    "nobody hears of a grant": ("scheduler.py", 'ledger.tell(ticket, "granted")', "pass"),
    "nobody hears of a move": ("scheduler.py", 'ledger.tell(ticket, "moved")', "pass"),
    "the silent are granted": (
        "scheduler.py",
        "elif self.workforce.is_silent(ticket.worker):",
        "elif False:",
    ),
    "the silent keep unconfirmed grants": (
        "workforce.py",
        "and not ticket.is_confirmed:",
        "and False:",
    ),
    "a named grant is passed on too early": (
        "workforce.py",
        " and beat.ack >= ticket.named_in",
        "",
    ),
    "a worker dies an instant late": (
        "workforce.py",
        "silent >= timing.worker_ttl_ms",
        "silent > timing.worker_ttl_ms",
    ),
    "the dead keep no places": ("workforce.py", "not (ticket.is_known and", "not (False and"),
    "parked tickets stay parked": ("workforce.py", "self._ledger.make_ready(ticket)", "pass"),
    "a clock set back goes unnoticed": ("scheduler.py", "self.offset += ledger.now - now", "pass"),
    "another server goes unnoticed": (
        "scheduler.py",
        "if known != self.server and known:",
        "if False:",
    ),
    "a store that is behind goes unnoticed": (
        "scheduler.py",
        "return has_forgotten or (self.workforce.is_behind(call) and not is_recovering)",
        "return has_forgotten",
    ),
    "the queue takes one more": (
        "scheduler.py",
        "ledger.waiting >= policy.queue_depth",
        "ledger.waiting > policy.queue_depth",
    ),
    "a wait outlasts the tier's budget": (
        "scheduler.py",
        "wait_ms = min(wait_ms, max(0, command.wait_ms))",
        "wait_ms = max(0, command.wait_ms)",
    ),
    "too many are away": ("ledger.py", "bound // 4", "bound // 2"),
    "the grace outlasts the deadline": (
        "ledger.py",
        "min(ticket.deadline_at, since + policy.grace_ms)",
        "since + policy.grace_ms",
    ),
    "a crowd is told one time": ("forecast.py", "tier.waiting * gap) + gap", "tier.waiting * gap)"),
    "the median passes for the tenth": (
        "estimates.py",
        "for percent in (10, 50)",
        "for percent in (50, 50)",
    ),
    "grants are never forgotten": ("estimates.py", "if passed > 0:", "if False:"),
    "deleted tiers keep their waiters": (
        "scheduler.py",
        "range(min(len(tier.queue), room))",
        "range(0)",
    ),
    "anybody may confirm": (
        "workforce.py",
        "if ticket.worker != call.worker:\n            return False",
        "if False:\n            return False",
    ),
    "a stranger's ticket is attached": ("scheduler.py", " or ticket.flow != command.flow:", ":"),
    "an older policy wins": (
        "scheduler.py",
        "policy.version > ledger.policy.version",
        "policy.version != ledger.policy.version",
    ),
}

NARROW = load_scheduler(narrow_edits())
NARROW_SOURCE = narrow_source(script.SOURCE)


@pytest.mark.parametrize("slip", LUA)
def test_a_slip_in_the_script_is_noticed(client: redis.Redis, slip: str) -> None:
    source = edited(script.SOURCE, [LUA[slip]])
    assert _is_noticed(client, (Scheduler, source), (NARROW, narrow_source(source)))


@pytest.mark.parametrize("slip", PYTHON)
def test_a_slip_in_the_scheduler_is_noticed(client: redis.Redis, slip: str) -> None:
    file, *change = PYTHON[slip]
    edits = {file: [change]}
    narrow = narrow_edits()
    narrow[file] = [*narrow.get(file, ()), change]
    pairs = (load_scheduler(edits), script.SOURCE), (load_scheduler(narrow), NARROW_SOURCE)
    assert _is_noticed(client, *pairs)


def test_both_lists_name_the_same_slips() -> None:
    assert list(LUA) == list(PYTHON)


def _is_noticed(client: redis.Redis, *pairs: tuple[Any, str]) -> bool:
    for seed in range(STORIES):
        twins = Twins(client, TIMINGS[seed // 2 % len(TIMINGS)], *pairs[seed % 2])
        try:
            tell(Scenario(twins), seed, LENGTH)
        except (Difference, redis.ResponseError, LookupError, ValueError, TypeError):
            return True
        finally:
            twins.close()
    return False
