"""The bootstrap decides before it installs; installing itself is what ``python3 -m tests`` does."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from demo_project import bootstrap
from demo_project.bootstrap import CannotStart


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with an environment in it that has nothing installed."""
    environment = tmp_path / ".venv"
    python = bootstrap.interpreter(environment)
    python.parent.mkdir(parents=True)
    python.touch()
    (environment / "pyvenv.cfg").write_text("version = 3.12.1")
    (tmp_path / "pyproject.toml").write_text("[project]")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "ENVIRONMENT", environment)
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have been run."""
    commands: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "_call", lambda what, command, **_: commands.append(command))
    monkeypatch.setattr(bootstrap, "_pip_version", lambda python: (25, 3))
    return commands


def test_an_old_interpreter_can_read_it_and_is_told_what_is_needed() -> None:
    source = Path(bootstrap.__file__).read_text()
    ast.parse(source, feature_version=(3, 8))
    with pytest.raises(CannotStart, match=r"Python >= 3\.11 is needed, this is 3\.8"):
        bootstrap.check_interpreter((3, 8))


def test_a_newer_interpreter_on_the_path_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name == "python3.12")
    with pytest.raises(CannotStart, match=r"There is a python3\.12 on the PATH"):
        bootstrap.check_interpreter((3, 10))


def test_it_needs_nothing_but_the_standard_library() -> None:
    for name in ("bootstrap.py", "__main__.py"):
        tree = ast.parse(Path(bootstrap.__file__).with_name(name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            else:
                modules = [alias.name for alias in getattr(node, "names", [])]
            for module in modules:
                top = module.split(".")[0]
                assert top in sys.stdlib_module_names or module == "demo_project.bootstrap"


def test_windows_without_a_redis_url_is_told_what_to_do() -> None:
    bootstrap.check_store("linux", {})
    bootstrap.check_store("win32", {"REDIS_URL": "redis://127.0.0.1/0"})
    with pytest.raises(CannotStart, match="REDIS_URL"):
        bootstrap.check_store("win32", {})


def test_a_second_run_installs_nothing(root: Path, calls: list[list[str]]) -> None:
    monkey_usable(root)
    bootstrap._install(bootstrap.interpreter(root / ".venv"), "demo")
    calls.clear()
    assert bootstrap.prepare("demo") == bootstrap.interpreter(root / ".venv")
    assert calls == []


def test_the_tests_bring_what_the_demo_needs(root: Path, calls: list[list[str]]) -> None:
    python = bootstrap.interpreter(root / ".venv")
    bootstrap._install(python, "test")
    assert bootstrap.is_installed(python, "demo")
    assert not bootstrap.is_installed(python, "lint")


@pytest.mark.parametrize("changed", ["pyproject.toml", ".venv/pyvenv.cfg"])
def test_other_dependencies_or_another_python_install_again(
    root: Path, calls: list[list[str]], changed: str
) -> None:
    python = bootstrap.interpreter(root / ".venv")
    bootstrap._install(python, "demo")
    assert bootstrap.is_installed(python, "demo")
    (root / changed).write_text("changed")
    assert not bootstrap.is_installed(python, "demo")


def test_an_old_pip_is_upgraded_first(
    root: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "_pip_version", lambda python: (23, 2))
    bootstrap._install(bootstrap.interpreter(root / ".venv"), "demo")
    assert [command[4] for command in calls] == ["--upgrade", "--editable"]


def test_an_environment_that_does_not_run_is_made_again(root: Path, calls: list[list[str]]) -> None:
    bootstrap._make_environment(bootstrap.interpreter(root / ".venv"))
    assert calls == [[sys.executable, "-m", "venv", "--clear", str(root / ".venv")]]


def test_a_python_that_cannot_make_environments_is_told_what_to_install(
    root: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "_has_module", lambda name: False)
    with pytest.raises(CannotStart, match="apt install python3-venv"):
        bootstrap._make_environment(bootstrap.interpreter(root / ".venv"))


def test_a_missing_network_is_guessed_from_what_pip_says() -> None:
    text = bootstrap._explain("Installing", ["NewConnectionError(...)\n"])
    assert "Is the network up" in text
    assert "network" not in bootstrap._explain("Installing", ["SyntaxError: invalid syntax\n"])


def test_a_command_that_fails_is_shown_with_its_last_words() -> None:
    with pytest.raises(CannotStart, match=r"(?s)Trying failed.*out of paper"):
        bootstrap._call("Trying", [sys.executable, "-c", "raise SystemExit('out of paper')"])


def monkey_usable(root: Path) -> None:
    """Let the environment's interpreter be one that runs."""
    python = bootstrap.interpreter(root / ".venv")
    python.unlink()
    python.symlink_to(sys.executable)
