"""The commands as a person runs them: real processes, real ports, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demo_project.load_client import fetch
from demo_project.serving import free_port, listen

pytestmark = pytest.mark.servers

MANAGE = str(Path(__file__).parents[2] / "manage.py")
OURS = ("REDIS_URL", "DATABASE_URL", "UPSTREAM_URL", "WORKERS", "PORT", "DJANGO_SETTINGS_MODULE")
ENVIRON = {name: value for name, value in os.environ.items() if name not in OURS}


def manage(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, MANAGE, *arguments],
        env={**ENVIRON, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def start(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, MANAGE, *arguments],
        env={**ENVIRON, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_check_is_content() -> None:
    run = manage("demo", "--check", "--json")
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert [(chat["tier"], chat["sdk"]) for chat in report["chats"]] == [
        (tier, sdk)
        for tier in ("premium", "pro", "free", "guest")
        for sdk in ("anthropic", "openai")
    ]
    assert len(report["sync"]) == 2
    assert all(chat["ok"] and chat["reply"] for chat in report["chats"] + report["sync"])
    assert report["burst"]["granted"] == 45
    assert report["burst"]["waited"] > 0
    assert report["upstream"]["peak"] <= 30
    assert report["upstream"]["refused_429"] == 0
    assert report["left"] == {"in_flight": 0, "waiting": 0}


SMALL = (
    "--premium=3",
    "--pro=2",
    "--free=6",
    "--guest=3",
    "--capacity=3",
    "--service=0.3",
    "--arrive=0.2",
    "--json",
)


@pytest.fixture(scope="module")
def compared() -> subprocess.CompletedProcess[str]:
    """Over Redis, against the gates that it is compared with."""
    return manage("stampede", *SMALL, "--workers=2", "--compare")


def test_a_small_stampede_over_redis(compared: subprocess.CompletedProcess[str]) -> None:
    judge(compared)


def test_a_small_stampede_in_one_process() -> None:
    judge(manage("stampede", *SMALL, "--workers=1", "--backend=locmem"))


def judge(run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 0, run.stderr
    report: dict[str, Any] = json.loads(run.stdout)
    assert {tier: figures["offered"] for tier, figures in report["tiers"].items()} == {
        "premium": 3,
        "pro": 2,
        "free": 6,
        "guest": 3,
    }
    assert report["tiers"]["premium"]["granted"] == 3
    assert report["upstream"] == {"capacity": 3, "peak": 3, "refused_429": 0}
    assert report["left"] == {"in_flight": 0, "waiting": 0}
    assert report["service_ms"] > 0


def test_the_gates_it_is_compared_with_run_the_same_load(
    compared: subprocess.CompletedProcess[str],
) -> None:
    assert compared.returncode == 0, compared.stderr
    semaphore, counter = json.loads(compared.stdout)["compared"]
    assert semaphore["upstream"]["refused_429"] > 0
    assert counter["upstream"]["refused_429"] == 0


async def test_the_demo_says_what_to_open_and_stops_on_sigterm(tmp_path: Path) -> None:
    port = free_port()
    demo = start("demo", PORT=str(port), DATABASE_URL=f"sqlite:///{tmp_path / 'db'}", WORKERS="1")
    assert demo.stdout is not None
    welcome = next(line for line in demo.stdout if "Chat" in line)
    assert welcome.split() == ["Chat", f"http://127.0.0.1:{port}/"]
    assert (await fetch(("127.0.0.1", port), "GET", "/")).status == 200
    assert (await fetch(("127.0.0.1", port), "GET", "/static/demo_project/chat.js")).status == 200
    demo.send_signal(signal.SIGTERM)
    demo.communicate(timeout=15)
    assert demo.returncode == 0
    assert (await fetch(("127.0.0.1", port), "GET", "/")).error


def test_a_port_that_was_asked_for_and_is_in_use_is_an_error() -> None:
    with listen(0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        run = manage("demo", PORT=str(port))
    assert run.returncode == 1
    assert run.stderr.strip() == f"CommandError: Port {port} is in use. Set PORT to another one."


@pytest.mark.parametrize(
    "environ",
    [{"PORT": "http"}, {"WORKERS": "0"}, {"DATABASE_URL": "chat"}, {"UPSTREAM_URL": "chat"}],
)
def test_a_variable_that_makes_no_sense_is_named_in_one_line(environ: dict[str, str]) -> None:
    run = manage("demo", **environ)
    assert run.returncode == 1
    assert len(run.stderr.strip().splitlines()) == 1
    assert next(iter(environ)) in run.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("provider", "--capacity=0"),
        ("provider", "--jitter=2"),
        ("stampede", "--backend=locmem"),
        ("stampede", "--free=-1"),
        ("demo", "--json"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: tuple[str, ...]) -> None:
    run = manage(*arguments)
    assert run.returncode == 1
    assert run.stderr.startswith("CommandError:")
