from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from demo_project.children import ChildFailed, Children
from demo_project.serving import free_port, is_free, listen

ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
READY = "print('ready', flush=True); import time; time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}"
PARENT = """
import os, sys
from demo_project.children import Children
child = Children().start("child", "-c", sys.argv[1], environ=os.environ)
child.wait_until_ready()
print(child.process.pid, flush=True)
sys.stdin.read()
"""
ORPHAN = f"from demo_project.children import end_with_parent; end_with_parent(); {READY}"


def test_a_child_says_when_it_is_ready_and_is_gone_afterwards() -> None:
    with Children() as children:
        child = children.start("child", "-c", READY, environ=ENVIRON)
        assert child.wait_until_ready() == "ready"
        assert child.is_running()
    assert not child.is_running()


def test_children_are_stopped_when_the_command_fails() -> None:
    with pytest.raises(KeyboardInterrupt), Children() as children:
        child = children.start("child", "-c", READY, environ=ENVIRON)
        raise KeyboardInterrupt
    assert not child.is_running()


def test_a_child_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo_project.children.STOP_SECONDS", 0.2)
    with Children() as children:
        child = children.start("child", "-c", STUBBORN, environ=ENVIRON)
        child.wait_until_ready()
    assert child.process.returncode == -signal.SIGKILL


def test_a_child_that_ends_before_it_is_ready_is_an_error() -> None:
    with Children() as children:
        child = children.start("worker 1", "-c", "raise SystemExit(3)", environ=ENVIRON)
        with pytest.raises(ChildFailed, match=r"The worker 1 did not start \(exit code 3\)"):
            child.wait_until_ready()


def test_a_child_that_says_nothing_is_an_error() -> None:
    with Children() as children:
        child = children.start("child", "-c", "import time; time.sleep(60)", environ=ENVIRON)
        with pytest.raises(ChildFailed, match="did not start"):
            child.wait_until_ready(timeout=0.2)


def test_a_job_is_waited_for() -> None:
    with Children() as children:
        assert children.start("job", "-c", "print(7)", environ=ENVIRON).finish() == "7\n"
        with pytest.raises(ChildFailed, match="The job failed"):
            children.start("job", "-c", "raise SystemExit(1)", environ=ENVIRON).finish()


def test_a_dead_child_is_started_again() -> None:
    with Children() as children:
        child = children.start("child", "-c", READY, environ=ENVIRON)
        child.kill()
        again = children.restart(child)
        assert again.wait_until_ready() == "ready"
        assert children.running == [again]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_children_do_not_outlive_a_parent_that_was_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, ORPHAN],
        env=ENVIRON,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin and parent.stdout
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    # The descriptor becomes readable when the process ends.
    import select

    assert select.select([child], [], [], 3.0)[0]
    os.close(child)


def test_free_ports() -> None:
    port = free_port()
    assert is_free(port)
    with listen(port) as listener:
        listener.listen()
        assert not is_free(port)
        assert free_port(port) > port


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="the system has no shared ports")
def test_workers_share_a_port_that_others_cannot_have() -> None:
    with listen(0, shared=True) as first:
        first.listen()
        port = first.getsockname()[1]
        with listen(port, shared=True) as second:
            second.listen()
        assert not is_free(port)
