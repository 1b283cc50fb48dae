"""``python3 -m tests.lint``: every check that needs no test run."""

import subprocess
import sys
import time

from demo_project.bootstrap import ROOT, CannotStart, prepare

CHECKS = {
    "ruff check": ["-m", "ruff", "check", "."],
    "ruff format": ["-m", "ruff", "format", "--check", "."],
    "mypy": ["-m", "mypy"],
    "import floors": ["-c", "from importlinter.cli import lint_imports_command as run; run()"],
    "migrations": ["manage.py", "makemigrations", "--check", "--settings=tests.settings"],
}


def main() -> None:
    try:
        python = str(prepare("lint"))
    except CannotStart as problem:
        sys.exit(f"error: {problem}")
    failed = [name for name, arguments in CHECKS.items() if not passes(name, [python, *arguments])]
    sys.exit(f"Failed: {', '.join(failed)}" if failed else 0)


def passes(name: str, command: list) -> bool:
    """Run one check; its output is shown where it fails."""
    started = time.monotonic()
    run = subprocess.run(
        command, cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    is_good = run.returncode == 0
    sys.stdout.write(
        f"{name:14} {'ok' if is_good else 'FAILED'}  {time.monotonic() - started:.1f} s\n"
    )
    sys.stdout.write("" if is_good else run.stdout)
    sys.stdout.flush()
    return is_good


if __name__ == "__main__":
    main()
