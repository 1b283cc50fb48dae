"""An LLM service and what it can take."""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.db import models
from django.utils.translation import gettext_lazy as _

from .fields import MAX_COUNT, MAX_SECONDS, VersionField, in_range, within
from .reservations import errors_together
from .rows import Named

MAX_DRAIN_MS = 500


class Upstream(Named):
    """An LLM service and what it can take."""

    capacity = models.PositiveIntegerField(
        _("capacity"),
        validators=within(0, MAX_COUNT),
        help_text=_(
            "How many calls may run at once, over all workers and tiers. Lowering it cuts no "
            "running stream: nobody is let in until enough have ended. 0 lets nobody in."
        ),
    )
    queue_depth = models.PositiveIntegerField(
        _("queue depth"),
        null=True,
        blank=True,
        validators=within(0, MAX_COUNT),
        help_text=_(
            "How many requests may wait, all tiers together. 0: nobody waits. Empty: only the "
            "tiers' own queue depths count."
        ),
    )
    max_hold = models.PositiveIntegerField(
        _("longest hold"),
        default=300,
        validators=within(1, MAX_SECONDS),
        help_text=_("Seconds. A stream that runs for longer is ended and its slot taken back."),
    )
    drain = models.PositiveIntegerField(
        _("drain"),
        default=50,
        validators=within(0, MAX_DRAIN_MS),
        help_text=_(
            "Milliseconds, 0 to 500. A slot stays taken for so long after a call was broken off, "
            "because the service itself notices a little later."
        ),
    )
    grace = models.PositiveIntegerField(
        _("keep my place"),
        default=15,
        validators=within(0, MAX_SECONDS),
        help_text=_(
            "Seconds. A waiting client whose connection drops may come back to its place for "
            "so long. 0: the place is lost at once."
        ),
    )
    is_paused = models.BooleanField(
        _("paused"),
        default=False,
        help_text=_(
            "Lets nobody in. Waiters stay in line within their budgets; running streams go on."
        ),
    )
    version = VersionField(
        _("version"),
        default=1,
        editable=False,
        help_text=_("Goes up with every edit. Workers follow the highest they have seen."),
    )

    limits_come_with_it = False
    """Whether a form edits the tier limits in the same step and checks them against this row."""

    class Meta:
        ordering = ("slug",)
        verbose_name = _("upstream")
        verbose_name_plural = _("upstreams")
        constraints = (
            in_range("upstream", "capacity", 0, MAX_COUNT, _("The capacity is 0 to 1,000,000.")),
            in_range(
                "upstream", "queue_depth", 0, MAX_COUNT, _("The queue depth is 0 to 1,000,000.")
            ),
            in_range(
                "upstream", "max_hold", 1, MAX_SECONDS, _("The longest hold is 1 to 86,400 s.")
            ),
            in_range("upstream", "drain", 0, MAX_DRAIN_MS, _("The drain is 0 to 500 ms.")),
            in_range(
                "upstream", "grace", 0, MAX_SECONDS, _("Keep my place lasts 0 to 86,400 seconds.")
            ),
        )

    def clean(self) -> None:
        super().clean()
        if self.pk is None or self.limits_come_with_it or not isinstance(self.capacity, int):
            return
        limits = list(self.limits.select_related("tier"))
        alone = [error for limit in limits for error in limit.errors_alone(self.capacity)]
        errors = [error for _field, error in alone] + errors_together(self.capacity, limits)
        if errors:
            raise ValidationError({"capacity": errors})
