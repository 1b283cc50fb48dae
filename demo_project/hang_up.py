"""An HTTP protocol for uvicorn that says at once when a client has hung up.

An application hears of it some turns of the event loop later, when its task that awaits
``receive()`` runs again. In a process that stood still for a moment, a call that came after the
hanging-up is then counted before it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextvars import copy_context
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

KEY = "demo_project.on_hang_up"


def on_hang_up(scope: MutableMapping[str, Any], act: Callable[[], None]) -> None:
    """Have ``act`` called, in this context, in the step that finds the connection closed."""
    context = copy_context()
    scope[KEY] = lambda: context.run(act)


class HangUpProtocol(AutoHTTPProtocol):  # type: ignore[misc]  # which one it is, is found out there
    scope: MutableMapping[str, Any] | None
    """That of the request that this connection is at, or of its last one."""

    def eof_received(self) -> Any:
        self._act()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._act()
        super().connection_lost(exc)

    def _act(self) -> None:
        if self.scope is not None and KEY in self.scope:
            self.scope.pop(KEY)()
