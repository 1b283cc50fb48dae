"""Processes that one of the demo's commands starts, and stops again whatever happens."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import FrameType
from typing import Self

PARENT = "DEMO_PARENT_PID"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_SECONDS = 6.0


class ChildFailed(Exception):
    """A child ended, or said nothing, before it was ready."""


class Child:
    """A process of ours. Its first line on standard output says that it is ready."""

    def __init__(self, name: str, arguments: list[str], environ: Mapping[str, str]) -> None:
        self.name = name
        self.arguments = arguments
        self.environ = environ
        self.process = subprocess.Popen(  # noqa: S603 - our own modules, no shell
            [sys.executable, *arguments],
            env={**environ, PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches the parent alone, which stops us in order
        )

    def __repr__(self) -> str:
        return f"<Child {self.name}, pid {self.process.pid}, exit code {self.process.poll()}>"

    def wait_until_ready(self, timeout: float = 60.0) -> str:
        """Its first line; raises ChildFailed where none comes."""
        assert self.process.stdout is not None  # noqa: S101 - narrows the type
        timer = threading.Timer(timeout, self.process.kill)
        timer.start()
        line = self.process.stdout.readline().strip()
        timer.cancel()
        if not line:
            raise ChildFailed(f"The {self.name} did not start (exit code {self.process.wait()}).")
        return line

    def finish(self, timeout: float = 60.0) -> str:
        """Wait for it to end well and return all that it printed."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"The {self.name} did not end within {timeout:.0f} s.") from None
        if self.process.returncode != 0:
            raise ChildFailed(f"The {self.name} failed (exit code {self.process.returncode}).")
        return output

    def is_running(self) -> bool:
        return self.process.poll() is None

    def terminate(self) -> None:
        if self.is_running():
            self.process.terminate()

    def kill(self) -> None:
        """The last resort, for it and for what it has started."""
        if self.is_running():
            if os.name == "nt":
                self.process.kill()
            else:
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class UpInside(ABC):
    """What is up inside a ``with`` block and gone afterwards, also where its start fails."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...


class Children:
    """All children of one command: ``with Children() as children: …`` ends with none left."""

    def __init__(self) -> None:
        self.running: list[Child] = []

    def start(self, name: str, *arguments: str, environ: Mapping[str, str]) -> Child:
        child = Child(name, list(arguments), environ)
        self.running.append(child)
        return child

    def restart(self, child: Child) -> Child:
        child.close()
        self.running.remove(child)
        return self.start(child.name, *child.arguments, environ=child.environ)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self, *these: Child) -> None:
        """Ask *these* children, or all, to end, and see to it that they do."""
        leaving = these or tuple(self.running)
        for child in leaving:
            child.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for child in leaving:
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
            child.close()
            self.running.remove(child)


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does: by way of its ``finally`` blocks."""
    for name in ("SIGTERM", "SIGHUP", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def end_with_parent() -> None:
    """Called by a child at its start: get SIGTERM when the parent dies without stopping us."""
    parent = os.environ.get(PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before we asked
        sys.exit(0)
