"""The grid of supported versions: ``nox`` runs all of it, ``nox --list`` names the cells."""

import nox

nox.options.default_venv_backend = "uv|virtualenv"

PYPROJECT = nox.project.load_toml("pyproject.toml")
GRID = [
    (python, django)
    for python in ("3.11", "3.12", "3.13")
    for django in ("5.2", "6.0", "6.1")
    if python != "3.11" or django == "5.2"  # Django 6 needs Python 3.12
]


@nox.session
@nox.parametrize("python,django", GRID)
def tests(session: nox.Session, django: str) -> None:
    session.install(
        "-e", ".", f"django=={django}.*", *nox.project.dependency_groups(PYPROJECT, "test")
    )
    session.run("pytest", *session.posargs)
