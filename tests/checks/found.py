"""What our checks find."""

from __future__ import annotations

from django.core.checks import Tags, run_checks

from llm_throttle.checks import TAG

REDIS = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}


def found(tag: str = TAG, **kwargs) -> dict[str, str]:
    """The messages of our checks by id, each with its hint."""
    return {
        str(message.id).removeprefix("llm_throttle."): f"{message.msg} {message.hint}"
        for message in run_checks(tags=[tag], **kwargs)
        if str(message.id).startswith("llm_throttle.")
    }


def in_database() -> dict[str, str]:
    return found(Tags.database, databases=["default"])
