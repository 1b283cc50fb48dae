"""The comparison of the twins notices every one of these slips, in either of them.

Each is a change of text. One whose text has gone fails its test, so that the list stays true when
the scheduler changes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from llm_throttle.backends import script
from llm_throttle.scheduling.scheduler import Scheduler

from .scenario import TIMINGS, Scenario, tell
from .twins import Edits, Twins, agree, edited, load_scheduler, narrow_edits, narrow_source

STORIES = 24
LENGTH = 250

IN_LUA = {
    "a reservation is broken into": ("return free > reserved\n", "return free >= reserved\n"),
    "a cap is passed by one": ("held >= tier.cap", "held > tier.cap"),
    "reservations give no right": ("if held < tier.reserved then", "if false then"),
    "a late tier is not lifted": ("room.passed = math.max(state.passed, room.passed)", ""),
    "every grant lifts": ("if room.is_contested then", "if true then"),
    "lifted to the pass after its increment": (
        "      room.record_grant",
        "      room.passed = state.passed\n      room.record_grant",
    ),
    "ties go to the lighter tier": ("tier.weight > best.weight", "tier.weight < best.weight"),
    "an edited weight counts late": (
        "state.passed = math.min(state.passed, room.passed + math.floor(SCALE / weight))",
        "",
    ),
    "nothing drains": ("room.give_back(ticket, is_abnormal)", "room.give_back(ticket, false)"),
    "a user may have one more": (
        "flow and room._depth(flow) >= tier.depth_per_user",
        "flow and room._depth(flow) > tier.depth_per_user",
    ),
    "away tickets count for their user": ("#flow.held - #flow.away", "#flow.held"),
    "no tombstone for the unknown": (
        "    room.bar(id, call.worker, call.seq)\n      elseif",
        "\n      elseif",
    ),
}
