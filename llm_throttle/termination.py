"""Hear of SIGTERM beside the server that handles it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

Reaction = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Handler:
    """Reacts in a thread of its own, and lets the server's handler do what it did before.

    A handler interrupts any line of the main thread, whatever lock it holds.
    """

    react: Reaction
    previous: Callable[[int, FrameType | None], Any]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        threading.Thread(target=self.react, name="llm-throttle-sigterm", daemon=True).start()
        self.previous(number, frame)


def before_sigterm(react: Reaction) -> None:
    """Have ``react`` called when this process is asked to stop, whoever else handles that.

    Call it again when a server may have set a handler since. Where there is none, or outside of
    the main thread, where Python allows none, nothing is changed: then the process just ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    previous = signal.getsignal(signal.SIGTERM)
    if callable(previous) and not (isinstance(previous, Handler) and previous.react == react):
        signal.signal(signal.SIGTERM, Handler(react, previous))
