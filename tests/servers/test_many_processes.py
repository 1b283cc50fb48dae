"""An edit reaches every process within the stated delay, and no process turns back. CONF-02."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .rig import ROOT, environment, seed

KINDS = ["thread"] * 4 + ["celery", "loop"]
"""Four web workers, a process of tasks and one of consumers."""

MAX_AGE = 2.0
SLACK = 1.5
"""Seconds for a beat, a question and a busy machine."""

EDITS = {
    "saved": ("limit.is_paused = {value}; limit.save()", 0.0),
    "bulk": ("Upstream.objects.filter(slug='many').update(is_paused={value})", MAX_AGE),
}


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("many")
    throttle = {"POLICY_MAX_AGE": MAX_AGE, "BEAT": 0.5}
    environ = environment(directory, SERVERS_THROTTLE=json.dumps(throttle))
    seed(environ, "many:50")
    return environ


@pytest.fixture(scope="module")
def samples(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list]:
    """The files that the processes write."""
    directory = tmp_path_factory.mktemp("samples")
    files = [directory / f"{number}-{kind}" for number, kind in enumerate(KINDS)]
    processes = []
    for kind, file in zip(KINDS, files, strict=True):
        with file.open("wb") as out:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.servers.sampler", kind],
                    cwd=ROOT,
                    env=environ,
                    stdout=out,
                    stdin=subprocess.DEVNULL,
                )
            )
    yield files
    for process in processes:
        process.terminate()
        process.wait(10)


def edit(environ: dict[str, str], code: str) -> float:
    """Edit the rows in a process of its own; when it was done."""
    whole = (
        "import django; django.setup()\n"
        "from llm_throttle.models import Upstream\n"
        f"limit = Upstream.objects.get(slug='many'); {code}\n"
    )
    subprocess.run([sys.executable, "-c", whole], cwd=ROOT, env=environ, check=True)
    return time.monotonic()


def lines(file: Path) -> list[list]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def until_all_say(files: list[Path], answer: str, seconds: float) -> None:
    give_up_at = time.monotonic() + seconds
    while not all((told := lines(file)) and told[-1][1] == answer for file in files):
        assert time.monotonic() < give_up_at, {file.name: lines(file)[-3:] for file in files}
        time.sleep(0.05)


@pytest.mark.parametrize("way", EDITS)
def test_all_agree_in_time_and_none_turns_back(
    way: str, environ: dict[str, str], samples: list[Path]
) -> None:
    code, delay = EDITS[way]
    until_all_say(samples, "granted", 30)
    before = {file: len(lines(file)) for file in samples}
    edited_at = edit(environ, code.format(value=True))
    until_all_say(samples, "paused", delay + SLACK + 5)
    time.sleep(MAX_AGE)  # long enough for a process with the old rows to publish them again
    for file in samples:
        changes = lines(file)[before[file] :]
        assert [answer for _, answer in changes] == ["paused"], file.name
        assert changes[0][0] - edited_at < delay + SLACK, file.name
    edit(environ, code.format(value=False))
    until_all_say(samples, "granted", delay + SLACK + 5)


def test_processes_that_find_a_fault_together_agree_on_one_version(
    environ: dict[str, str], samples: list[Path]
) -> None:
    """All of them see the digest that does not fit, and each would publish anew."""
    until_all_say(samples, "granted", 30)
    for capacity in (20, 30):
        edit(environ, f"Upstream.objects.filter(slug='many').update(capacity={capacity})")
        time.sleep(MAX_AGE + SLACK)
    versions = [version(environ)]
    time.sleep(MAX_AGE + SLACK)
    versions.append(version(environ))
    assert versions[0] == versions[1], "they must not republish for ever"


def version(environ: dict[str, str]) -> int:
    code = (
        "import django; django.setup()\n"
        "from llm_throttle.models import Upstream\n"
        "import sys; sys.stdout.write(str(Upstream.objects.get(slug='many').version))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, check=True, capture_output=True
    )
    return int(done.stdout)
