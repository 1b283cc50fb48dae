"""``scheduler.lua`` does what ``scheduling/scheduler.py`` says, command by command.

After each command the answers and the whole books of both must be equal. Half of the stories run
with narrow bounds (on sweeps, grants per verb, holds remembered and so on), which a short story
reaches; the bounds themselves are compared in ``test_script_hygiene.py``.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from llm_throttle.backends import script
from llm_throttle.scheduling.scheduler import Scheduler

from .scenario import ACTIONS, MANNER, TIMINGS, WEIGHTS, Scenario, tell
from .twins import Twins, load_scheduler, narrow_edits, narrow_source

EXAMPLES = 220
STEPS = 60
MIN_COMMANDS = 12_000
LONG_RUNS = 12
LONG_RUN = 500

PLAIN = (Scheduler, script.SOURCE)
NARROW = (load_scheduler(narrow_edits()), narrow_source(script.SOURCE))


class Story(RuleBasedStateMachine):
    """A story that Hypothesis makes up: one rule per action of the scenario."""

    client: Any
    pair: tuple[Any, str]
    commands: int

    @initialize(timing=st.integers(0, len(TIMINGS) - 1), diligent=st.integers(0, 4))
    def begin(self, timing: int, diligent: int) -> None:
        self.twins = Twins(self.client, TIMINGS[timing], *self.pair)
        self.scenario = Scenario(self.twins, diligent=diligent)

    def teardown(self) -> None:
        if hasattr(self, "twins"):
            type(self).commands += self.twins.commands
            self.twins.close()


def _rule_for(name: str) -> Any:
    def act(self: Story, **values: int) -> None:
        self.scenario.act(name, **values)

    bounds = ACTIONS[name] | MANNER
    act.__name__ = name
    return rule(**{key: st.integers(0, most) for key, most in bounds.items()})(act)


for _name in ACTIONS:
    for _copy in range(WEIGHTS.get(_name, 1)):  # Hypothesis picks each rule as often
        setattr(Story, f"{_name}_{_copy}", _rule_for(_name))


@pytest.mark.parametrize("pair", [PLAIN, NARROW], ids=["plain", "narrow"])
def test_any_story_has_the_same_answers_and_books_in_both_twins(
    client: redis.Redis, pair: tuple[Any, str]
) -> None:
    machine = type("Told", (Story,), {"client": client, "pair": pair, "commands": 0})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            print_blob=True,
            report_multiple_bugs=False,
            phases=set(Phase) - {Phase.explain},  # the answers and books say it all
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert machine.commands >= MIN_COMMANDS


@pytest.mark.parametrize("seed", range(LONG_RUNS))
def test_long_stories_keep_the_twins_equal(client: redis.Redis, seed: int) -> None:
    twins = Twins(client, TIMINGS[seed // 2 % len(TIMINGS)], *(PLAIN, NARROW)[seed % 2])
    tell(Scenario(twins), seed, LONG_RUN)
    twins.close()
