"""What one tier may have of one upstream, and what is wrong with it whatever the others have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from llm_throttle.scheduling.policy import DEFAULT_DEPTH_PER_USER

from .fields import MAX_COUNT, MAX_SECONDS, in_range, within
from .reservations import errors_together
from .rows import PolicyRow
from .tier import Tier
from .upstream import Upstream

EMPTY_CELLS = {
    "reserved": 0,
    "weight": 1,
    "wait_budget": 0,
    "depth_per_user": DEFAULT_DEPTH_PER_USER,
}
"""What an empty cell of a tier limit stands for; an empty cap or queue depth is kept as it is."""

MAX_WEIGHT = 1000
MAX_DEPTH_PER_USER = 100


class TierLimit(PolicyRow):
    """What one tier may have of one upstream. An empty cell has a documented meaning."""

    upstream = models.ForeignKey(
        Upstream, models.CASCADE, related_name="limits", verbose_name=_("upstream")
    )
    tier = models.ForeignKey(Tier, models.CASCADE, related_name="limits", verbose_name=_("tier"))
    cap = models.PositiveIntegerField(
        _("cap"),
        null=True,
        blank=True,
        validators=within(0, MAX_COUNT),
        help_text=_("The most slots this tier may hold at once. Empty: the whole capacity."),
    )
    reserved = models.PositiveIntegerField(
        _("reserved"),
        default=EMPTY_CELLS["reserved"],
        blank=True,
        validators=within(0, MAX_COUNT),
        help_text=_("Slots kept free for this tier whoever else waits. Empty or 0: none."),
    )
    weight = models.PositiveIntegerField(
        _("weight"),
        default=EMPTY_CELLS["weight"],
        blank=True,
        validators=within(1, MAX_WEIGHT),
        help_text=_(
            "1 to 1000. Its share while tiers compete: 10 gets ten slots for each one of a tier "
            "with 1. Empty: 1."
        ),
    )
    wait_budget = models.PositiveIntegerField(
        _("wait budget"),
        default=EMPTY_CELLS["wait_budget"],
        blank=True,
        validators=within(0, MAX_SECONDS),
        help_text=_(
            "Seconds that a request may wait for a slot before it is refused. Empty or 0: it "
            "never waits."
        ),
    )
    queue_depth = models.PositiveIntegerField(
        _("queue depth"),
        null=True,
        blank=True,
        validators=within(0, MAX_COUNT),
        help_text=_(
            "How many requests of this tier may wait. 0: none. Empty: only the upstream's own "
            "queue depth counts."
        ),
    )
    depth_per_user = models.PositiveIntegerField(
        _("depth per user"),
        default=EMPTY_CELLS["depth_per_user"],
        blank=True,
        validators=within(1, MAX_DEPTH_PER_USER),
        help_text=_("1 to 100. How many requests one user may have waiting and running. Empty: 8."),
    )

    class Meta:
        ordering = ("upstream", "-weight", "tier")
        verbose_name = _("tier limit")
        verbose_name_plural = _("tier limits")
        constraints = (
            models.UniqueConstraint(
                fields=("upstream", "tier"),
                name="llm_throttle_one_limit_per_tier",
                violation_error_message=_(
                    "This upstream has limits for this tier already. Load the page again to see "
                    "them."
                ),
            ),
            models.CheckConstraint(
                condition=Q(reserved__lte=F("cap")),
                name="llm_throttle_tierlimit_reserved_within_cap",
                violation_error_message=_("A tier cannot reserve more slots than its cap."),
            ),
            in_range("tierlimit", "cap", 0, MAX_COUNT, _("The cap is 0 to 1,000,000.")),
            in_range("tierlimit", "reserved", 0, MAX_COUNT, _("Reserved is 0 to 1,000,000.")),
            in_range("tierlimit", "weight", 1, MAX_WEIGHT, _("The weight is 1 to 1000.")),
            in_range(
                "tierlimit", "wait_budget", 0, MAX_SECONDS, _("The wait budget is 0 to 86,400 s.")
            ),
            in_range(
                "tierlimit", "queue_depth", 0, MAX_COUNT, _("The queue depth is 0 to 1,000,000.")
            ),
            in_range(
                "tierlimit",
                "depth_per_user",
                1,
                MAX_DEPTH_PER_USER,
                _("The depth per user is 1 to 100."),
            ),
        )

    def __str__(self) -> str:
        return f"{self.upstream} · {self.tier}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        self.fill_empty_cells()
        super().save(*args, **kwargs)

    def fill_empty_cells(self) -> None:
        """Put the documented number where a form or a caller left None."""
        for name, number in EMPTY_CELLS.items():
            if getattr(self, name) is None:
                setattr(self, name, number)

    def clean(self) -> None:
        super().clean()
        self.fill_empty_cells()
        if self.upstream_id is None and not self.upstream_is_new():
            return
        errors: dict[str, list[ValidationError]] = {}
        for field, error in self.errors_alone(self.upstream.capacity):
            errors.setdefault(field, []).append(error)
        if not errors and not self.upstream.limits_come_with_it and self.tier_id is not None:
            others = self.upstream.limits.exclude(pk=self.pk).exclude(tier=self.tier_id)
            limits = [*others.select_related("tier"), self]
            errors[NON_FIELD_ERRORS] = errors_together(self.upstream.capacity, limits)
        if any(errors.values()):
            raise ValidationError(errors)

    def upstream_is_new(self) -> bool:
        """Whether the upstream is only in memory yet, as in the form that creates both."""
        return "upstream" in self._state.fields_cache

    def errors_alone(self, capacity: int | None) -> Iterator[tuple[str, ValidationError]]:
        """What is wrong with these numbers whatever the other tiers have: (field, error)."""
        cap, reserved = self.cap, self.reserved
        params = {"tier": self._tier_name(), "cap": cap, "reserved": reserved, "capacity": capacity}
        if cap == 0:
            yield "cap", ValidationError(_CAP_0, code="cap_0", params=params)
        elif _exceeds(cap, capacity):
            yield (
                "cap",
                ValidationError(_CAP_ABOVE_CAPACITY, code="cap_above_capacity", params=params),
            )
        if _exceeds(reserved, capacity):
            yield "reserved", ValidationError(_RESERVED_ABOVE_CAPACITY, code="cap", params=params)
        elif cap != 0 and isinstance(cap, int) and isinstance(reserved, int) and reserved > cap:
            yield "reserved", ValidationError(_RESERVED_ABOVE_CAP, code="reserved", params=params)

    def _tier_name(self) -> str:
        return str(self.tier) if self.tier_id is not None else "?"


_CAP_0 = _(
    "Tier “%(tier)s” could never be served with a cap of 0. Leave the cell empty to allow the "
    "whole capacity, or enter at least 1."
)
_CAP_ABOVE_CAPACITY = _(
    "Tier “%(tier)s” has a cap of %(cap)s, more than the capacity of %(capacity)s. Lower the "
    "cap, or leave the cell empty: then it follows the capacity."
)
_RESERVED_ABOVE_CAPACITY = _(
    "Tier “%(tier)s” reserves %(reserved)s slots, more than the capacity of %(capacity)s."
)
_RESERVED_ABOVE_CAP = _(
    "Tier “%(tier)s” reserves %(reserved)s slots, more than its cap of %(cap)s."
)


def _exceeds(number: object, capacity: int | None) -> bool:
    # Capacity 0 shuts the upstream; the tiers' numbers may stay for the time after.
    return bool(capacity) and isinstance(number, int) and number > (capacity or 0)
