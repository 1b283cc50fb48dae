"""A private PostgreSQL for one test run: in a temporary directory, behind a Unix socket."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

USER = "postgres"
"""Whom the server runs as where the tests run as root, which it refuses."""


def binary(name: str) -> str | None:
    """Where a program of PostgreSQL is: distributions keep them off the path."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)])
    return shutil.which(name, path=path)


def why_not() -> str:
    """What is missing to run one, "" if nothing."""
    if os.name == "nt" or binary("initdb") is None or binary("postgres") is None:
        return "PostgreSQL is not installed (Debian: apt-get install postgresql)"
    if os.getuid() == 0 and _user() is None:
        return f"root may not run PostgreSQL, and there is no user {USER!r} to run it as"
    return ""


def _user() -> pwd.struct_passwd | None:
    for name in (USER, "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None


@contextmanager
def postgres(database: str) -> Iterator[str]:
    """A server with one empty database; the directory of its socket, which is its HOST."""
    directory = Path(tempfile.mkdtemp(prefix="llm-throttle-pg-"))
    run_as = {}
    if os.getuid() == 0 and (user := _user()) is not None:
        os.chown(directory, user.pw_uid, user.pw_gid)
        run_as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    environ = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(directory)}

    def run(program: str, *arguments: str) -> None:
        subprocess.run(
            [str(binary(program)), *arguments],
            check=True,
            capture_output=True,
            env=environ,
            cwd=directory,
            **run_as,
        )

    data, log = str(directory / "data"), str(directory / "log")
    options = f"-c listen_addresses= -c unix_socket_directories={directory} -c fsync=off"
    try:
        run("initdb", "-D", data, "-U", USER, "--auth=trust", "--no-sync", "-E", "UTF8")
        run("pg_ctl", "-D", data, "-l", log, "-w", "-t", "60", "-o", options, "start")
        try:
            import psycopg

            with psycopg.connect(
                host=str(directory), user=USER, dbname="postgres", autocommit=True
            ) as connection:
                connection.execute(f'CREATE DATABASE "{database}"')
            os.chmod(directory, 0o755)
            yield str(directory)
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def a_postgres(database: str) -> Iterator[str]:
    """``postgres`` for a test: skipped, outside of CI, where there is none."""
    missing = why_not()
    if missing and os.environ.get("CI") != "true":
        pytest.skip(missing)
    assert not missing
    with postgres(database) as host:
        yield host
