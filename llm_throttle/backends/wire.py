"""One connection to the store that runs scripts: bounded in time, never retried by the library.

Every error of the store comes out as ``BackendDown``. A script that the server has forgotten is
sent again as a whole. Which server process answers is read once per connection, because a new
one may have forgotten what the old one knew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from redis.connection import ConnectionInterface
from redis.exceptions import NoScriptError, RedisError, ResponseError

from llm_throttle.exceptions import BackendDown

from .script import SOURCE

Pool = Any
Prepared = tuple[list[str], list[Any]]
"""The keys and the arguments of one run of the script."""

SHA = hashlib.sha1(SOURCE.encode(), usedforsecurity=False).hexdigest()


class Wire:
    """Runs batches of scripts on one connection. Not thread-safe: each thread has its own."""

    def __init__(self, pool: Callable[[], Pool]) -> None:
        self._pool = pool
        self._connection: ConnectionInterface | None = None
        self.server = ""

    def connect(self) -> None:
        """Be connected and know the server; cheap where that is so already.

        A connection that the server has closed meanwhile is found out here, before anything is
        sent: else the first request after each restart of the store would be refused.
        """
        if self._connection is not None and not _is_stale(self._connection):
            return
        self.close()
        try:
            connection = self._pool().make_connection()
            connection.connect()
            self.server = _run_id(connection)
        except (RedisError, OSError) as error:
            raise BackendDown(str(error)) from error
        self._connection = connection

    def run(self, batch: Sequence[Prepared]) -> list[Any]:
        """The raw answers to a batch of scripts, in order; an answer may be a ``BackendDown``."""
        commands = [("EVALSHA", SHA, len(keys), *keys, *args) for keys, args in batch]
        answers = self.execute(commands)
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            again = self.execute([("EVAL", SOURCE, *commands[i][2:]) for i in unknown])
            for i, answer in zip(unknown, again, strict=True):
                answers[i] = answer
        return [_own_error(answer) for answer in answers]

    def execute(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands in one go and read an answer or an error for each."""
        self.connect()
        connection = self._connection
        assert connection is not None  # noqa: S101 - connect() raises otherwise
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            return [_read(connection) for _ in commands]
        except (RedisError, OSError) as error:
            self.close()
            raise BackendDown(str(error)) from error
        except BaseException:  # half an answer may be left on the line
            self.close()
            raise

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()


def _is_stale(connection: ConnectionInterface) -> bool:
    """Whether there is something to read that nobody asked for: the end, or worse."""
    try:
        return bool(connection.can_read(timeout=0))
    except (RedisError, OSError):
        return True


def _read(connection: ConnectionInterface) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:  # answered, so the line is still in step
        return error


def _own_error(answer: Any) -> Any:
    return BackendDown(str(answer)) if isinstance(answer, RedisError) else answer


def _run_id(connection: ConnectionInterface) -> str:
    """The id of the server process, "" where an ACL forbids asking."""
    connection.send_command("INFO", "server")
    info = _read(connection)
    if isinstance(info, ResponseError):
        return ""
    text = info.decode() if isinstance(info, bytes) else str(info)
    return next((line[7:] for line in text.splitlines() if line.startswith("run_id:")), "")
