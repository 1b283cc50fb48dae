"""Hear of SIGTERM beside the server that handles it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


def before_sigterm(react: Callable[[], None]) -> None:
    """Have ``react`` called, in a thread of its own, when this process is asked to stop.

    The handler that a server has set is called as before. Without one, or outside of the main
    thread, where Python allows no handler, nothing is changed: then the process just ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    previous = signal.getsignal(signal.SIGTERM)
    if not callable(previous):
        return

    def handle(number: int, frame: FrameType | None) -> None:
        # A handler interrupts any line of the main thread, whatever lock it holds.
        threading.Thread(target=react, name="llm-throttle-sigterm", daemon=True).start()
        previous(number, frame)

    signal.signal(signal.SIGTERM, handle)
