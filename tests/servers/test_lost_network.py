"""A client whose packets get lost, and of whom nobody hears any more. LEAK-09 (c)."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from .rig import environment, seed, served_by, the_same_store, until

MAX_HOLD = 3
CLIENT = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as connection:
    connection.sendall(f"GET {sys.argv[3]} HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n".encode())
    seen = b""
    while b"data: one" not in seen:
        more = connection.recv(4096)
        assert more, seen
        seen += more
    print("streaming", flush=True)
    time.sleep(60)
"""


@dataclass(frozen=True)
class Cable:
    """Two ends of a network of our own: ours, and one in a namespace that can be cut off."""

    here: str
    namespace: str

    def cut(self) -> None:
        ip("-n", self.namespace, "link", "set", "there", "down")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command (Debian: apt-get install iproute2)")
    name = f"llm{secrets.token_hex(4)}"
    subnet = 4 * secrets.randbelow(
        64
    )  # of those for documentation; another one is still going away
    here, there = f"198.51.100.{subnet + 1}", f"198.51.100.{subnet + 2}"
    try:
        ip("netns", "add", name)
        ip("link", "add", name, "type", "veth", "peer", "name", "there", "netns", name)
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"no network of our own can be made here: {error.stderr.decode().strip()}")
    try:
        ip("addr", "add", f"{here}/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", f"{there}/30", "dev", "there")
        ip("-n", name, "link", "set", "there", "up")
        yield Cable(here, name)
    finally:
        ip("link", "del", name)  # now; a namespace takes its time
        ip("netns", "del", name)


@contextmanager
def client(cable: Cable, port: int, path: str) -> Iterator[None]:
    """One that has read the first bytes of its stream."""
    command = ["ip", "netns", "exec", cable.namespace, sys.executable, "-c", CLIENT]
    with subprocess.Popen(
        [*command, cable.here, str(port), path], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"streaming\n"
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["uvicorn", "gunicorn gthread"])
async def test_a_stream_into_the_void_ends_after_max_hold(
    tmp_path: Path, cable: Cable, name: str
) -> None:
    environ, slug = environment(tmp_path), f"void-{name.split()[0]}"
    await asyncio.to_thread(seed, environ, f"{slug}:1:3:{MAX_HOLD}")
    with the_same_store(), served_by(name, environ, tmp_path / "log", host=cable.here) as server:
        path = f"/sync/streamed/?upstream={slug}&do=go-on"
        with client(cable, server.port, path):
            cable.cut()
            with pytest.raises(AssertionError, match="in_flight=1"):
                await until(slug, MAX_HOLD - 1.5, in_flight=0)  # nobody knows yet
            await until(slug, MAX_HOLD + 1, in_flight=0, waiting=0)
