"""The numbers of the rows: their ranges, and the version that counts edits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q

if TYPE_CHECKING:
    from django_stubs_ext import StrPromise

    _Counter = models.PositiveBigIntegerField[int, int]
else:
    _Counter = models.PositiveBigIntegerField

MAX_COUNT = 1_000_000
"""Ceiling of slots and queue depths: above any real one, far below where integers get inexact."""

MAX_SECONDS = 86_400
"""Ceiling of durations: nobody waits for longer than a day, nor streams for longer."""


def within(low: int, high: int) -> list[Any]:
    return [MinValueValidator(low), MaxValueValidator(high)]


def in_range(
    model: str, field: str, low: int, high: int, message: StrPromise
) -> models.CheckConstraint:
    """A constraint that also holds for writers who never call ``full_clean``."""
    return models.CheckConstraint(
        condition=Q(**{f"{field}__range": (low, high)}),
        name=f"llm_throttle_{model}_{field}_range",
        violation_error_message=message,
    )


class VersionField(_Counter):
    """A counter that saving an instance never writes back.

    Two operators may hold the same row in two forms; whoever saves last would otherwise set the
    version back to the one that the form was opened with.
    """

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        return super().pre_save(model_instance, add) if add else F(self.attname)
