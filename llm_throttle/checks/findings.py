"""What a check says: an error or a warning with its number, and what to do about it."""

from __future__ import annotations

from django.core.checks import Error, Warning

TAG = "llm_throttle"


def error(number: int, message: str, hint: str) -> Error:
    return Error(message, hint=hint, id=f"llm_throttle.E{number:03}")


def warning(number: int, message: str, hint: str) -> Warning:
    return Warning(message, hint=hint, id=f"llm_throttle.W{number:03}")
