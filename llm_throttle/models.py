"""The rows that an operator edits: upstreams, tiers, the limits of a tier at an upstream.

Numbers are refused in three places, each for its own reason. Constraints refuse what makes no sense
whoever writes it. ``clean()`` refuses what makes sense alone but not with the other rows, in words
that name them. What still gets in (``QuerySet.update``, a restored backup) is made safe where the
policy is built (``policies.build``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

from django.conf import settings
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models, router, transaction
from django.db.models import F, Q, Sum
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from .scheduling.policy import DEFAULT_DEPTH_PER_USER

if TYPE_CHECKING:
    from django_stubs_ext import StrPromise

    _Counter = models.PositiveBigIntegerField[int, int]
else:
    _Counter = models.PositiveBigIntegerField

IMPLICIT_TIER = "default"
"""The tier of callers without a tier. It has no row; ``policies.build`` makes it up if needed."""

MAX_COUNT = 1_000_000
"""Ceiling of slots and queue depths: above any real one, far below where integers get inexact."""

MAX_SECONDS = 86_400
"""Ceiling of durations: nobody waits for longer than a day, nor streams for longer."""

EMPTY_CELLS = {
    "reserved": 0,
    "weight": 1,
    "wait_budget": 0,
    "depth_per_user": DEFAULT_DEPTH_PER_USER,
}
"""What an empty cell of a tier limit stands for; an empty cap or queue depth is kept as it is."""

MAX_DRAIN_MS = 500
MAX_WEIGHT = 1000
MAX_DEPTH_PER_USER = 100

SLUG_MESSAGE = _(
    "Use only the letters a to z and A to Z, digits, hyphens and underscores: no spaces, colons, "
    "braces or accented letters."
)
SLUG_HELP = _(
    "The name that the code and the metrics use. Letters a to z and A to Z, digits, hyphens and "
    "underscores. It cannot be changed later."
)


def _within(low: int, high: int) -> list[Any]:
    return [MinValueValidator(low), MaxValueValidator(high)]


def _range(
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


class PolicyRow(models.Model):
    """A row that policies are built from: it changes together with the version, or not at all."""

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        # The version is bumped by signals, which Django sends outside of its own transaction.
        using = kwargs.get("using") or router.db_for_write(type(self), instance=self)
        with transaction.atomic(using=using):
            super().save(*args, **kwargs)


class Named(PolicyRow):
    """A row that is known by a slug which stays what it is."""

    slug = models.SlugField(
        _("slug"), unique=True, help_text=SLUG_HELP, error_messages={"invalid": SLUG_MESSAGE}
    )
    name = models.CharField(
        _("name"), max_length=100, blank=True, help_text=_("For people. Empty: the slug is shown.")
    )

    loaded_slug: str | None = None
    """The slug that the row has in the database, None before it is saved."""

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return self.name or self.slug

    def save(self, *args: Any, **kwargs: Any) -> None:
        super().save(*args, **kwargs)
        self.loaded_slug = self.slug

    @classmethod
    def from_db(
        cls, db: str | None, field_names: Collection[str], values: Collection[Any], **kwargs: Any
    ) -> Self:
        instance = super().from_db(db, field_names, values, **kwargs)
        instance.loaded_slug = instance.__dict__.get("slug")
        return instance

    def clean(self) -> None:
        super().clean()
        if self.loaded_slug is not None and self.slug != self.loaded_slug:
            raise ValidationError({"slug": self._slug_is_fixed()})

    def _slug_is_fixed(self) -> ValidationError:
        return ValidationError(
            _(
                "The slug “%(slug)s” cannot be changed: what runs now is counted under it. "
                "Create a new one, then delete this one."
            ),
            code="slug_fixed",
            params={"slug": self.loaded_slug},
        )


class Upstream(Named):
    """An LLM service and what it can take."""

    capacity = models.PositiveIntegerField(
        _("capacity"),
        validators=_within(0, MAX_COUNT),
        help_text=_(
            "How many calls may run at once, over all workers and tiers. Lowering it cuts no "
            "running stream: nobody is let in until enough have ended. 0 lets nobody in."
        ),
    )
    queue_depth = models.PositiveIntegerField(
        _("queue depth"),
        null=True,
        blank=True,
        validators=_within(0, MAX_COUNT),
        help_text=_(
            "How many requests may wait, all tiers together. 0: nobody waits. Empty: only the "
            "tiers' own queue depths count."
        ),
    )
    max_hold = models.PositiveIntegerField(
        _("longest hold"),
        default=300,
        validators=_within(1, MAX_SECONDS),
        help_text=_("Seconds. A stream that runs for longer is ended and its slot taken back."),
    )
    drain = models.PositiveIntegerField(
        _("drain"),
        default=50,
        validators=_within(0, MAX_DRAIN_MS),
        help_text=_(
            "Milliseconds, 0 to 500. A slot stays taken for so long after a call was broken off, "
            "because the service itself notices a little later."
        ),
    )
    grace = models.PositiveIntegerField(
        _("keep my place"),
        default=15,
        validators=_within(0, MAX_SECONDS),
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
            _range("upstream", "capacity", 0, MAX_COUNT, _("The capacity is 0 to 1,000,000.")),
            _range(
                "upstream", "queue_depth", 0, MAX_COUNT, _("The queue depth is 0 to 1,000,000.")
            ),
            _range("upstream", "max_hold", 1, MAX_SECONDS, _("The longest hold is 1 to 86,400 s.")),
            _range("upstream", "drain", 0, MAX_DRAIN_MS, _("The drain is 0 to 500 ms.")),
            _range(
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
        validators=_within(0, MAX_COUNT),
        help_text=_("The most slots this tier may hold at once. Empty: the whole capacity."),
    )
    reserved = models.PositiveIntegerField(
        _("reserved"),
        default=EMPTY_CELLS["reserved"],
        blank=True,
        validators=_within(0, MAX_COUNT),
        help_text=_("Slots kept free for this tier whoever else waits. Empty or 0: none."),
    )
    weight = models.PositiveIntegerField(
        _("weight"),
        default=EMPTY_CELLS["weight"],
        blank=True,
        validators=_within(1, MAX_WEIGHT),
        help_text=_(
            "1 to 1000. Its share while tiers compete: 10 gets ten slots for each one of a tier "
            "with 1. Empty: 1."
        ),
    )
    wait_budget = models.PositiveIntegerField(
        _("wait budget"),
        default=EMPTY_CELLS["wait_budget"],
        blank=True,
        validators=_within(0, MAX_SECONDS),
        help_text=_(
            "Seconds that a request may wait for a slot before it is refused. Empty or 0: it "
            "never waits."
        ),
    )
    queue_depth = models.PositiveIntegerField(
        _("queue depth"),
        null=True,
        blank=True,
        validators=_within(0, MAX_COUNT),
        help_text=_(
            "How many requests of this tier may wait. 0: none. Empty: only the upstream's own "
            "queue depth counts."
        ),
    )
    depth_per_user = models.PositiveIntegerField(
        _("depth per user"),
        default=EMPTY_CELLS["depth_per_user"],
        blank=True,
        validators=_within(1, MAX_DEPTH_PER_USER),
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
            _range("tierlimit", "cap", 0, MAX_COUNT, _("The cap is 0 to 1,000,000.")),
            _range("tierlimit", "reserved", 0, MAX_COUNT, _("Reserved is 0 to 1,000,000.")),
            _range("tierlimit", "weight", 1, MAX_WEIGHT, _("The weight is 1 to 1000.")),
            _range(
                "tierlimit", "wait_budget", 0, MAX_SECONDS, _("The wait budget is 0 to 86,400 s.")
            ),
            _range(
                "tierlimit", "queue_depth", 0, MAX_COUNT, _("The queue depth is 0 to 1,000,000.")
            ),
            _range(
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


class TierAssignment(PolicyRow):
    """One user's tier, whatever groups the user is in."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL,
        models.CASCADE,
        related_name="llm_throttle_assignment",
        verbose_name=_("user"),
    )
    tier = models.ForeignKey(
        Tier, models.CASCADE, related_name="assignments", verbose_name=_("tier")
    )
    expires_at = models.DateTimeField(
        _("expires at"),
        null=True,
        blank=True,
        help_text=_("From then on the user's groups decide again. Empty: never."),
    )

    class Meta:
        ordering = ("tier", "user")
        verbose_name = _("tier assignment")
        verbose_name_plural = _("tier assignments")

    def __str__(self) -> str:
        return f"{self.user} → {self.tier}"


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
_RESERVED_TOGETHER = _(
    "The reservations add up to %(total)s slots (%(parts)s), more than the capacity of "
    "%(capacity)s. Lower some, or raise the capacity."
)
_NEVER_SERVED = ngettext_lazy(
    "Tier %(tiers)s could never be served: it reserves nothing, and the reservations of the "
    "others (%(parts)s) fill the capacity of %(capacity)s. Lower one of them, or reserve at "
    "least 1 slot for it.",
    "Tiers %(tiers)s could never be served: they reserve nothing, and the reservations of the "
    "others (%(parts)s) fill the capacity of %(capacity)s. Lower one of them, or reserve at "
    "least 1 slot for each.",
    "number",
)


def _exceeds(number: object, capacity: int | None) -> bool:
    # Capacity 0 shuts the upstream; the tiers' numbers may stay for the time after.
    return bool(capacity) and isinstance(number, int) and number > (capacity or 0)


def errors_together(capacity: int | None, limits: Iterable[TierLimit]) -> list[ValidationError]:
    """What is wrong with the limits of all tiers of one upstream taken together.

    A tier without a row counts as one that reserves nothing.
    """
    if not capacity:
        return []
    reserving = {
        limit.tier_id: limit
        for limit in limits
        if limit.tier_id is not None and isinstance(limit.reserved, int) and limit.reserved > 0
    }
    total = sum(limit.reserved for limit in reserving.values())
    params = {
        "total": total,
        "capacity": capacity,
        "parts": ", ".join(f"{limit.tier} {limit.reserved}" for limit in reserving.values()),
    }
    if total > capacity:
        return [ValidationError(_RESERVED_TOGETHER, code="reserved_together", params=params)]
    unserved = [f"“{tier}”" for tier in Tier.objects.all() if tier.pk not in reserving]
    if total < capacity or not unserved:
        return []
    params |= {"tiers": ", ".join(unserved), "number": len(unserved)}
    return [ValidationError(_NEVER_SERVED, code="never_served", params=params)]
