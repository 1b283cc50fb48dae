"""Calls in flight are counted in the order in which clients come and go, whenever that is heard."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse

import pytest

from demo_project.bootstrap import ROOT
from demo_project.children import Child, Children
from demo_project.load_client import Address
from demo_project.witness import Witness

BODY = b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}'
CALL = (
    b"POST /v1/messages HTTP/1.1\r\nHost: provider\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)

Provider = tuple[Child, Address]


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with Children() as children:
        child = children.start(
            "provider", str(ROOT / "manage.py"), "provider", "--capacity=1", "--latency=0.3",
            environ=os.environ | {"DJANGO_SETTINGS_MODULE": "demo_project.settings"},
        )  # fmt: skip  # an option and its value are one
        host, _, port = child.wait_until_ready().removeprefix("http://").partition(":")
        yield child, (host, int(port))


@contextmanager
def standing_still(provider: Provider) -> Iterator[None]:
    """What happens inside, the process hears of all at once."""
    os.kill(provider[0].process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(provider[0].process.pid, signal.SIGCONT)


@contextmanager
def connected(address: Address) -> Iterator[socket.socket]:
    """A connection on which a call has been served, so that the server is ready for the next."""
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(CALL)
        assert status_of_answer(connection) == 200
        yield connection


def status_of_answer(connection: socket.socket) -> int:
    answer = HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def close(connection: socket.socket) -> None:
    connection.close()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("has_begun", [True, False], ids=["had begun", "came meanwhile"])
async def test_who_has_left_is_not_counted_with_who_comes_next(
    provider: Provider, leave, has_begun: bool
) -> None:
    witness = Witness(provider[1])
    with connected(provider[1]) as leaving, connected(provider[1]) as coming:
        await witness.reset()
        if has_begun:
            leaving.sendall(CALL)
            while not (await witness.stats())["in_flight"]:
                pass
        with standing_still(provider):
            if not has_begun:
                leaving.sendall(CALL)
            leave(leaving)
            coming.sendall(CALL)
        assert status_of_answer(coming) == 200
    stats = await witness.stats()
    assert (stats["peak"], stats["refused_429"], stats["in_flight"]) == (1, 0, 0)
