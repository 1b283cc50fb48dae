"""A class of callers, and how one gets into it."""

from __future__ import annotations

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db import models
from django.db.models import F, Q, Sum
from django.utils.translation import gettext_lazy as _

from .rows import Named

IMPLICIT_TIER = "default"
"""The tier of callers without a tier. It has no row; ``policies.build`` makes it up if needed."""


class Tier(Named):
    """A class of callers."""

    groups = models.ManyToManyField(
        "auth.Group",
        verbose_name=_("groups"),
        blank=True,
        related_name="llm_throttle_tiers",
        help_text=_(
            "Members of these groups are in this tier. Of several tiers the one with the highest "
            "weight counts."
        ),
    )
    is_default = models.BooleanField(
        _("default for signed-in users"),
        default=False,
        help_text=_("The tier of signed-in users that neither an assignment nor a group places."),
    )
    is_anonymous = models.BooleanField(
        _("for guests"), default=False, help_text=_("The tier of callers who are not signed in.")
    )

    class Meta:
        ordering = ("slug",)
        verbose_name = _("tier")
        verbose_name_plural = _("tiers")
        constraints = (
            models.UniqueConstraint(
                fields=("is_default",),
                condition=Q(is_default=True),
                name="llm_throttle_one_default_tier",
                violation_error_message=_("Another tier is the default for signed-in users."),
            ),
            models.UniqueConstraint(
                fields=("is_anonymous",),
                condition=Q(is_anonymous=True),
                name="llm_throttle_one_anonymous_tier",
                violation_error_message=_("Another tier is the one for guests."),
            ),
        )

    def clean(self) -> None:
        super().clean()
        errors = {
            "slug": self._reserved_slug(),
            "is_default": self._already("is_default"),
            "is_anonymous": self._already("is_anonymous"),
        }
        if self._state.adding:
            errors[NON_FIELD_ERRORS] = self._never_served()
        found = {field: error for field, error in errors.items() if error}
        if found:
            raise ValidationError(found)

    def _never_served(self) -> ValidationError | None:
        """Without a row of its own a new tier reserves nothing, and needs what others leave."""
        from .upstream import Upstream  # a circle: its rules read the tiers

        totals = Upstream.objects.annotate(reserved=Sum("limits__reserved"))
        full = totals.filter(capacity__gt=0, reserved__gte=F("capacity")).first()
        if full is None:
            return None
        return ValidationError(
            _(
                "The tiers reserve the whole capacity of the upstream “%(upstream)s”, so that a "
                "new tier could never be served there. Lower a reservation first."
            ),
            code="never_served",
            params={"upstream": full},
        )

    def _reserved_slug(self) -> ValidationError | None:
        # A row of this name would take in everybody who has no tier, guests too.
        if self.slug != IMPLICIT_TIER:
            return None
        return ValidationError(
            _(
                "“%(slug)s” is the name of the built-in tier for callers without a tier. Choose "
                "another slug, for example “standard”."
            ),
            code="slug_reserved",
            params={"slug": IMPLICIT_TIER},
        )

    def _already(self, mark: str) -> ValidationError | None:
        if not getattr(self, mark):
            return None
        other = Tier.objects.filter(**{mark: True}).exclude(pk=self.pk).first()
        if other is None:
            return None
        return ValidationError(
            _("The tier “%(tier)s” has this mark already. Take it off there first."),
            code="mark_taken",
            params={"tier": other},
        )
