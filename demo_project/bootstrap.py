"""Make ``.venv``, install one dependency group into it, and go on inside it.

Standard library only, and old syntax on purpose: an interpreter that is too old must get as far
as the sentence that says so.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
OLDEST_PYTHON = (3, 11)
NEWER_PYTHONS = ("python3.13", "python3.12", "python3.11")
OLDEST_PIP = (25, 1)  # the first that knows --group
INCLUDED_GROUPS = {"demo": (), "test": ("demo",), "lint": ("test", "demo")}
NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|ConnectTimeout"
    r"|ProxyError|Network is unreachable|No matching distribution found|Max retries exceeded"
)


class CannotStart(Exception):
    """What is missing, and what to do about it."""


def run_manage(*arguments: str) -> None:
    """Become ``manage.py`` with *arguments*, inside an environment that has the demo group."""
    _run("demo", str(ROOT / "manage.py"), *arguments)


def run_module(group: str, *arguments: str) -> None:
    """Become ``python -m`` with *arguments*, inside an environment that has *group*."""
    _run(group, "-m", *arguments)


def _run(group: str, *arguments: str) -> None:
    try:
        python = prepare(group)
    except CannotStart as problem:
        sys.exit(f"error: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
    os.chdir(str(ROOT))
    _become(str(python), *arguments)


def prepare(group: str) -> Path:
    """The interpreter of an environment that has everything in *group*."""
    check_interpreter(sys.version_info[:2])
    check_store(sys.platform, os.environ)
    python = interpreter(ENVIRONMENT)
    if not is_installed(python, group):
        with _one_at_a_time():
            if not is_installed(python, group):  # another run may have been at it
                _make_environment(python)
                _install(python, group)
    return python


def check_interpreter(version: tuple) -> None:
    if version >= OLDEST_PYTHON:
        return
    here = ".".join(map(str, version))
    newer = next(filter(shutil.which, NEWER_PYTHONS), None)
    advice = f" There is a {newer} on the PATH: use that instead of python3." if newer else ""
    raise CannotStart(f"Python >= 3.11 is needed, this is {here} ({sys.executable}).{advice}")


def check_store(platform: str, environ) -> None:
    if platform == "win32" and not environ.get("REDIS_URL"):
        raise CannotStart(
            "there is no Valkey wheel for Windows. Start a Redis or Valkey server (in WSL or "
            "Docker, say) and name it in REDIS_URL, for example redis://127.0.0.1:6379/0."
        )


def interpreter(environment: Path) -> Path:
    if os.name == "nt":
        return environment / "Scripts" / "python.exe"
    return environment / "bin" / "python"


# What is installed is written down, so that a second run starts at once.


def is_installed(python: Path, group: str) -> bool:
    stamp = _stamp(python, group)
    return python.exists() and stamp.exists() and stamp.read_text() == _fingerprint(python)


def _stamp(python: Path, group: str) -> Path:
    return python.parent.parent / f"installed-{group}.txt"


def _fingerprint(python: Path) -> str:
    """Changes with the dependencies and with the Python that the environment was made by."""
    sources = ROOT / "pyproject.toml", python.parent.parent / "pyvenv.cfg"
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


@contextmanager
def _one_at_a_time():
    """Two first runs side by side would install into each other's half-made environment."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    directory = os.open(str(ROOT), os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


# Making the environment, once.


def _make_environment(python: Path) -> None:
    if _is_usable(python):
        return
    if not _has_module("ensurepip"):
        raise CannotStart(
            "this Python cannot make virtual environments: ensurepip is missing. On Debian and "
            "Ubuntu: apt install python3-venv"
        )
    remake = ["--clear"] if ENVIRONMENT.exists() else []
    _call("Making the environment .venv", [sys.executable, "-m", "venv", *remake, str(ENVIRONMENT)])


def _is_usable(python: Path) -> bool:
    """Whether the environment's Python runs, is new enough and has pip (or gets it now)."""
    if not python.exists():
        return False
    new_enough = f"import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"
    return _succeeds(python, "-c", new_enough) and (
        _succeeds(python, "-m", "pip", "--version") or _succeeds(python, "-m", "ensurepip")
    )


def _install(python: Path, group: str) -> None:
    if _pip_version(python) < OLDEST_PIP:
        oldest = ".".join(map(str, OLDEST_PIP))
        _pip("Upgrading pip", python, "--upgrade", f"pip>={oldest}")
    _pip(
        f"Installing the {group} dependencies (about half a minute, once)",
        python,
        "--editable",
        ".",
        "--group",
        group,
    )
    for name in (group, *INCLUDED_GROUPS[group]):
        _stamp(python, name).write_text(_fingerprint(python))


def _pip_version(python: Path) -> tuple:
    text = subprocess.check_output([str(python), "-m", "pip", "--version"], universal_newlines=True)
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _pip(what: str, python: Path, *arguments: str) -> None:
    # PIP_USER would make pip refuse to install into an environment.
    _call(what, [str(python), "-m", "pip", "install", *arguments], PIP_USER="0")


def _call(what: str, command: list, **environ: str) -> None:
    """Run *command* quietly, show that time passes, and show its last words if it fails."""
    started = time.monotonic()
    output = []
    with subprocess.Popen(
        command,
        cwd=str(ROOT),
        env=dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", **environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    ) as process:
        reader = threading.Thread(target=output.extend, args=(process.stdout,))
        reader.start()
        try:
            _show_progress(what, reader, started)
        except KeyboardInterrupt:
            process.terminate()
            raise
    if process.returncode != 0:
        raise CannotStart(_explain(what, output))


def _show_progress(what: str, work: threading.Thread, started: float) -> None:
    """A line that counts the seconds; without a terminal a line now and then."""
    is_terminal = sys.stdout.isatty()
    print(f"{what} ...", end="" if is_terminal else "\n", flush=True)
    while work.is_alive():
        work.join(timeout=1 if is_terminal else 10)
        seconds = f"{time.monotonic() - started:.0f} s"
        if is_terminal:
            print(f"\r{what} ... {seconds}", end="", flush=True)
        else:
            print(f"  {seconds}", flush=True)
    if is_terminal:
        print(flush=True)


def _explain(what: str, output: list) -> str:
    text = "".join(output)
    advice = "\nIs the network up, and can pip reach its index?" if NO_NETWORK.search(text) else ""
    return f"{what} failed:\n\n{''.join(output[-15:])}{advice}"


def _has_module(name: str) -> bool:
    return _succeeds(Path(sys.executable), "-c", f"import {name}")


def _succeeds(python: Path, *arguments: str) -> bool:
    quiet = subprocess.DEVNULL
    try:
        return subprocess.call([str(python), *arguments], stdout=quiet, stderr=quiet) == 0
    except OSError:
        return False


def _become(*command: str) -> None:
    """Replace this process, so that signals and the exit code are the command's own."""
    sys.stdout.flush()
    if os.name == "nt":
        sys.exit(subprocess.call(command))
    os.execv(command[0], command)
