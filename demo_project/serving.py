"""Run an ASGI application on loopback and say on standard output when it is up."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from typing import Any

import uvicorn

from demo_project.children import end_with_parent

LOOPBACK = "127.0.0.1"
# Longer than any client keeps an idle connection: none is closed under a request on its way.
KEEP_ALIVE_SECONDS = 75
# A stream that is still running this long after SIGTERM is cut off.
GRACEFUL_SECONDS = 3


class AnnouncingServer(uvicorn.Server):
    """A server that prints one line once it listens, for whoever started it."""

    def __init__(self, config: uvicorn.Config, announcement: str) -> None:
        super().__init__(config)
        self.announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            sys.stdout.write(self.announcement + "\n")
            sys.stdout.flush()


def serve(application: Any, listener: socket.socket, announcement: str, **options: Any) -> None:
    """Serve *application* until a signal ends it; *options* are uvicorn's."""
    config = uvicorn.Config(
        application,
        lifespan="off",
        log_level="warning",
        access_log=False,
        # Else it believes what a client on this machine says of its address.
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACEFUL_SECONDS,
        **options,
    )
    AnnouncingServer(config, announcement).run(sockets=[listener])


def listen(port: int, *, shared: bool = False) -> socket.socket:
    """A socket on loopback; *shared* lets other workers listen on the same port.

    The kernel then spreads the connections evenly. With one inherited socket the worker that
    wakes first takes all that have arrived.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if os.name != "nt":  # there it would allow two servers on one port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared and hasattr(socket, "SO_REUSEPORT"):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((LOOPBACK, port))
    except OSError:
        listener.close()
        raise
    return listener


def is_free(port: int) -> bool:
    try:
        listen(port).close()
    except OSError:
        return False
    return True


def free_port(start: int = 0) -> int:
    """A free port on loopback: the first from *start* on, or any."""
    if start:
        return next(port for port in range(start, 65536) if is_free(port))
    with listen(0) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    """One server worker of the demo."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    end_with_parent()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "demo_project.settings")
    from demo_project.asgi import application

    serve(application, listen(port, shared=True), f"worker on port {port}")


if __name__ == "__main__":
    main()
