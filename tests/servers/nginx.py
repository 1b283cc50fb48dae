"""A private nginx for one test run: in a temporary directory, on loopback, as nobody."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo_project.serving import LOOPBACK, free_port

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto"
BLOCK = re.compile(r"^```nginx\n(.*?)^```$", re.MULTILINE | re.DOTALL)

CONFIGURATION = """
daemon off;
worker_processes 1;
pid {directory}/pid;
error_log {directory}/error.log warn;
events {{ worker_connections 256; }}
http {{
    access_log off;
    {places}
    upstream app {{ server {host}:{app}; }}
    gzip on;
    gzip_min_length 1;
    gzip_types text/event-stream application/json;
{servers}
}}
"""
PLACES = "\n    ".join(
    f"{name}_temp_path {{directory}}/{name};"
    for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
)
SERVER = """
    server {{
        listen {host}:{port};
        {settings}
    }}
"""
BARE = "location / { proxy_pass http://app; }"
"""What somebody writes who has read nothing."""


def settings_of(page: str) -> str:
    """What a page of the docs says that nginx needs, to the letter."""
    return "\n".join(BLOCK.findall((HOWTO / page).read_text()))


@dataclass(frozen=True)
class Front:
    """One ``server`` of nginx's, in front of the application."""

    port: int


def binary() -> str | None:
    """Distributions keep it where only root's path leads."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def need_nginx() -> None:
    """Skip the test, outside of CI, where there is none."""
    missing = "" if binary() else "nginx is not installed (Debian: apt-get install nginx-light)"
    if missing and os.environ.get("CI") != "true":
        pytest.skip(missing)
    assert not missing


@contextmanager
def nginx(app: int, *settings: str) -> Iterator[list[Front]]:
    """One front for each of the *settings*, all before the application at port *app*."""
    fronts = [Front(free_port()) for _ in settings]
    directory = Path(tempfile.mkdtemp(prefix="llm-throttle-nginx-"))
    servers = "".join(
        SERVER.format(host=LOOPBACK, port=front.port, settings=text)
        for front, text in zip(fronts, settings, strict=True)
    )
    places = PLACES.format(directory=directory)
    (directory / "nginx.conf").write_text(
        CONFIGURATION.format(
            directory=directory, host=LOOPBACK, app=app, servers=servers, places=places
        )
    )
    run_as = {}
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(directory, nobody.pw_uid, nobody.pw_gid)
        run_as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    log = directory / "error.log"
    process = subprocess.Popen(
        [str(binary()), "-p", directory, "-c", directory / "nginx.conf", "-e", log],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=directory,
        **run_as,
    )
    try:
        _wait_until_up(process, fronts)
        yield fronts
    finally:
        process.terminate()
        process.communicate(timeout=10)
        shutil.rmtree(directory, ignore_errors=True)


def _wait_until_up(process: subprocess.Popen[bytes], fronts: list[Front]) -> None:
    give_up_at = time.monotonic() + 10
    for front in fronts:
        while True:
            assert process.poll() is None, process.stderr.read()
            try:
                socket.create_connection((LOOPBACK, front.port), 1).close()
                break
            except OSError:
                assert time.monotonic() < give_up_at
                time.sleep(0.02)
