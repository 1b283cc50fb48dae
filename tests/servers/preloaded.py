"""A project that has used the waiting room before gunicorn forks its workers (``--preload``)."""

from .wsgi import application

__all__ = ["application"]


def use_it() -> None:
    from llm_throttle import admit
    from llm_throttle.identity import Identity

    with admit("forks", identity=Identity("at import", "any")) as lease:
        assert lease.tier == "any"


use_it()
