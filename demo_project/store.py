"""What the store believes, for the commands that must see it empty in the end."""

from __future__ import annotations

from demo_project.seeds import UPSTREAM


async def left() -> dict[str, int]:
    """Slots in use and requests waiting at the demo's upstream."""
    from llm_throttle.admission import asnapshot

    snapshot = await asnapshot(UPSTREAM)
    return {"in_flight": snapshot.in_flight, "waiting": snapshot.waiting}
