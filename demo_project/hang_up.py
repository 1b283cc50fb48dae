"""An HTTP protocol for uvicorn that says at once when a client has hung up.

An application hears of it some turns of the event loop later, when its task that awaits
``receive()`` runs again. In a process that stood still for a moment, a call that came after the
hanging-up is then counted before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from contextvars import copy_context
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

ACT = "demo_project.on_hang_up"
HAS_HUNG_UP = "demo_project.has_hung_up"


async def has_hung_up(scope: MutableMapping[str, Any]) -> bool:
    """Whether a client had hung up already when its request came to be answered.

    The end of a connection is read in the turn of the loop after that of its request, by some
    loops after the tasks of that turn have run.
    """
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return HAS_HUNG_UP in scope


def on_hang_up(scope: MutableMapping[str, Any], act: Callable[[], None]) -> None:
    """Have ``act`` called, in this context, in the step that finds the connection closed."""
    context = copy_context()
    scope[ACT] = lambda: context.run(act)


class HangUpProtocol(AutoHTTPProtocol):  # type: ignore[misc]  # which one it is, is found out there
    scope: MutableMapping[str, Any] | None
    """That of the request that this connection is at, or of its last one."""

    def eof_received(self) -> Any:
        self._hang_up()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hang_up()
        super().connection_lost(exc)

    def _hang_up(self) -> None:
        if self.scope is not None:
            self.scope[HAS_HUNG_UP] = True
            if act := self.scope.pop(ACT, None):
                act()
