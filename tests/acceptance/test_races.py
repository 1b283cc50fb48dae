"""RACE-06: a burst from four processes, released by a barrier, passes none of the bounds."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from .rig import ROOT, Rig, scaled

RIG = {"workers": 1, "users": 4}
PROCESSES = 4
ASKERS = 300
HOLD = 0.1


class Herd:
    """Processes that wait for orders."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.acceptance.herd"],
                env=rig.environ,
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(PROCESSES)
        ]
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.communicate()

    async def run(self, askers: list[dict[str, str]], takes: float) -> Counter[str]:
        """Let all ask at once and count what they were answered."""
        at = time.monotonic() + 0.4

        def order(number: int) -> list[str]:
            process = self.processes[number]
            assert process.stdin is not None and process.stdout is not None
            words: dict[str, Any] = {"at": at, "takes": takes, "askers": askers[number::PROCESSES]}
            line = json.dumps(words | {"provider": self.rig.witness.address})
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return list(json.loads(process.stdout.readline()))

        answers = await asyncio.gather(*(asyncio.to_thread(order, n) for n in range(PROCESSES)))
        return Counter(reason for part in answers for reason in part)


@pytest.fixture(scope="module")
def herd(rig: Rig) -> Iterator[Herd]:
    herd = Herd(rig)
    yield herd
    herd.stop()


async def most_seen(rig: Rig, stop: asyncio.Event) -> dict[str, int]:
    """The highest numbers in the store while the herd is at it."""
    most: Counter[str] = Counter()
    while not stop.is_set():
        seen = await asyncio.to_thread(rig.look)
        most["in_flight"] = max(most["in_flight"], seen.in_flight)
        most["waiting"] = max(most["waiting"], seen.waiting)
        for tier in seen.tiers:
            most[tier.tier] = max(most[tier.tier], tier.in_flight)
        await asyncio.sleep(0.005)
    return dict(most)


BOUNDS = {
    # one user, who may have one request: nobody waits, one runs
    "depth_per_user": ({"capacity": 2, "cap": 2, "depth_per_user": 1}, 1, 0, ["u"] * ASKERS),
    # all different, one slot for their tier of the two: one runs, five wait
    "cap": ({"capacity": 2, "cap": 1, "depth_per_user": 1}, 1, 5, None),
    # two slots for all: two run, five wait
    "capacity": ({"capacity": 2, "cap": 2, "depth_per_user": 1}, 2, 5, None),
}


@pytest.mark.parametrize("bound", BOUNDS)
async def test_a_burst_passes_no_bound(rig: Rig, herd: Herd, bound: str) -> None:
    cells, running, queued, flows = BOUNDS[bound]
    async with rig.operator() as operator:
        await operator.edit(every_tier={"cap": ""}, capacity=2)
        tier = {name: value for name, value in cells.items() if name != "capacity"}
        tier |= {"queue_depth": 5, "wait_budget": 30}
        await operator.edit(tiers={"premium": tier})
    askers = [
        {"flow": flows[number] if flows else f"u{number}", "tier": "premium"}
        for number in range(ASKERS)
    ]
    for _ in range(scaled(20) // len(BOUNDS) + 1):
        await rig.witness.reset()
        stop = asyncio.Event()
        watching = asyncio.create_task(most_seen(rig, stop))
        answers = await herd.run(askers, HOLD)
        stop.set()
        most = await watching
        stats = await rig.witness.stats()
        assert stats["peak"] <= running
        assert stats["refused_429"] == 0
        assert most["in_flight"] <= running
        assert most["premium"] <= running
        assert most["waiting"] <= queued
        served = answers.pop("called 200")
        # Who comes after the first have gone may find room again; a burst is over by then.
        assert served >= running + queued
        assert set(answers) == {"user_depth" if flows else "tier_full"}
        assert served + sum(answers.values()) == ASKERS
    await rig.empty_within(1)
