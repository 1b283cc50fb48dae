"""Being rung: many at once do not hold up what else runs."""

from __future__ import annotations

import asyncio

from llm_throttle.alarms import TaskAlarm, ring_all


async def test_ringing_many_lets_others_run_between() -> None:
    """A crowd of subscribers does not hold up what else the loop has to do."""
    alarms = [TaskAlarm() for _ in range(100)]
    woken: list[str] = []

    async def wait(alarm: TaskAlarm) -> None:
        await alarm.wait(5)
        woken.append("waiter")

    async def other() -> None:
        while len(woken) < 100:
            await asyncio.sleep(0)
            woken.append("other")

    waiting = [asyncio.create_task(wait(alarm)) for alarm in alarms]
    await asyncio.sleep(0)
    await asyncio.gather(other(), asyncio.to_thread(ring_all, alarms), *waiting)
    assert "waiter" * 20 not in "".join(woken)
    assert woken.count("other") >= 10
