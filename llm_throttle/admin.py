"""The operator's pages: an upstream with the limits of all tiers in one grid, tiers, assignments.

Nothing here talks to the store, so that the limits can be edited while it is down.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.forms.models import BaseInlineFormSet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from . import policies
from .exceptions import UnknownUpstream
from .models import (
    EMPTY_CELLS,
    IMPLICIT_TIER,
    SLUG_MESSAGE,
    Tier,
    TierAssignment,
    TierLimit,
    Upstream,
    errors_together,
)
from .scheduling.policy import Policy

if TYPE_CHECKING:
    _UpstreamForm = forms.ModelForm[Upstream]
    _TierForm = forms.ModelForm[Tier]
    _TierLimitForm = forms.ModelForm[TierLimit]
    _TierLimitFormSet = BaseInlineFormSet[TierLimit, Upstream, forms.ModelForm[TierLimit]]
    _TierLimitInline = admin.TabularInline[TierLimit, Upstream]
    _UpstreamAdmin = admin.ModelAdmin[Upstream]
    _TierAdmin = admin.ModelAdmin[Tier]
    _TierAssignmentAdmin = admin.ModelAdmin[TierAssignment]
else:
    _UpstreamForm = _TierForm = _TierLimitForm = forms.ModelForm
    _TierLimitFormSet = BaseInlineFormSet
    _TierLimitInline = admin.TabularInline
    _UpstreamAdmin = _TierAdmin = _TierAssignmentAdmin = admin.ModelAdmin


# An upstream and its grid


class UpstreamForm(_UpstreamForm):
    class Meta:
        error_messages = {"slug": {"invalid": SLUG_MESSAGE}}  # noqa: RUF012 - Django's form

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.instance.limits_come_with_it = True


class TierName(forms.HiddenInput):
    """The tier of a row, to be read and not chosen."""

    is_hidden = False  # its column has a heading like the others

    def __init__(self, tiers: dict[int, Tier]) -> None:
        super().__init__()
        self.tiers = tiers

    def render(
        self, name: str, value: Any, attrs: dict[str, Any] | None = None, renderer: Any = None
    ) -> SafeString:
        hidden = super().render(name, value, attrs, renderer)
        tier = self.tiers.get(int(value)) if str(value).isdigit() else None
        return format_html('{}<span class="llm-throttle-tier">{}</span>', hidden, tier or "")


class TierLimitForm(_TierLimitForm):
    def has_changed(self) -> bool:
        """A row is stored as it was shown, also where the operator kept all the defaults."""
        is_new = self.instance.pk is None and bool(self.data.get(self.add_prefix("tier")))
        return is_new or super().has_changed()


class TierLimitFormSet(_TierLimitFormSet):
    """One row per tier. What is wrong with the rows together is said here, once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        listed = {limit.tier_id for limit in self.get_queryset()} if self.instance.pk else set()
        self.unlisted = [tier for tier in self.tiers.values() if tier.pk not in listed]
        self.initial_extra = [{**EMPTY_CELLS, "tier": tier.pk} for tier in self.unlisted]

    @cached_property
    def tiers(self) -> dict[int, Tier]:
        return {tier.pk: tier for tier in Tier.objects.all()}

    @cached_property
    def policy(self) -> Policy | None:
        """The policy in force now, for the columns that tell what the numbers amount to."""
        try:
            return policies.load(self.instance.loaded_slug or "")
        except UnknownUpstream:
            return None

    def _construct_form(self, i: int, **kwargs: Any) -> Any:
        form = super()._construct_form(i, **kwargs)  # type: ignore[misc]  # the stubs lack it
        limit = form.instance
        limit.policy = self.policy
        new = i - self.initial_form_count()
        if limit.pk is None and not self.is_bound and new < len(self.unlisted):
            limit.tier = self.unlisted[new]
        return form

    def add_fields(self, form: Any, index: int | None) -> None:
        super().add_fields(form, index)
        form.fields["tier"].widget = TierName(self.tiers)

    def clean(self) -> None:
        super().clean()
        limits = [form.instance for form in self.forms if form.is_valid()]
        # A row that is wrong in itself is mended first: it would give misleading sums.
        if len(limits) < len(self.forms):
            return
        errors = errors_together(self.instance.capacity, limits)
        if errors:
            raise ValidationError(errors)


class TierLimitInline(_TierLimitInline):
    model = TierLimit
    form = TierLimitForm
    formset = TierLimitFormSet
    template = "llm_throttle/admin/tier_limits.html"
    can_delete = False  # a tier without a row is served by the defaults, not shut out
    fields = (
        "tier",
        "cap",
        "reserved",
        "weight",
        "wait_budget",
        "queue_depth",
        "depth_per_user",
        "guaranteed",
        "turn",
    )
    readonly_fields = ("guaranteed", "turn")

    def get_queryset(self, request: HttpRequest) -> QuerySet[TierLimit]:
        return super().get_queryset(request).select_related("tier")

    def get_extra(self, request: HttpRequest, obj: Upstream | None = None, **kwargs: Any) -> int:
        listed = 0 if obj is None else obj.limits.count()
        return Tier.objects.count() - listed

    def get_max_num(
        self, request: HttpRequest, obj: Upstream | None = None, **kwargs: Any
    ) -> int | None:
        return Tier.objects.count()

    @admin.display(description=_("guaranteed"))
    def guaranteed(self, limit: TierLimit) -> str | SafeString:
        policy = _policy_with(limit)
        if policy is None:
            return "-"
        slug = limit.tier.slug
        alone, together = policy.guaranteed_slots(slug), guaranteed_with_heavier(policy, slug)
        words = ngettext("%d slot", "%d slots", alone) % alone
        if together <= alone:
            return words
        more = gettext("%d with the heavier tiers") % together
        return format_html('{}<br><span class="quiet">{}</span>', words, more)

    @admin.display(description=_("its turn after"))
    def turn(self, limit: TierLimit) -> str:
        policy = _policy_with(limit)
        if policy is None:
            return "-"
        if policy.usable_slots(limit.tier.slug) == 0:
            return gettext("never served")
        bound = policy.starvation_bound(limit.tier.slug)
        return gettext("%d others at most") % bound


def _policy_with(limit: TierLimit) -> Policy | None:
    policy: Policy | None = getattr(limit, "policy", None)
    if policy is None or limit.tier_id is None or limit.tier.slug not in policy.by_slug:
        return None
    return policy


def guaranteed_with_heavier(policy: Policy, slug: str) -> int:
    """Slots that this tier and all tiers of at least its weight can count on together.

    The caps of the lighter tiers say how much they can ever take; the rest is sure.
    """
    weight = policy.by_slug[slug].weight
    heavier = [tier for tier in policy if tier.weight >= weight]
    lighter = [tier for tier in policy if tier.weight < weight]
    left = policy.capacity - sum(tier.cap for tier in lighter)
    reserved = sum(tier.reserved for tier in heavier)
    return max(0, min(sum(tier.cap for tier in heavier), max(reserved, left)))


@admin.register(Upstream)
class UpstreamAdmin(_UpstreamAdmin):
    form = UpstreamForm
    inlines = (TierLimitInline,)
    list_display = ("__str__", "slug", "capacity", "queue_depth", "is_open", "version")
    list_filter = ("is_paused",)
    search_fields = ("slug", "name")
    actions = ("pause", "resume")
    readonly_fields = ("version", "without_a_tier")
    fieldsets = (
        (None, {"fields": ("slug", "name")}),
        (
            _("Who gets in"),
            {
                "fields": ("capacity", "is_paused", "queue_depth", "without_a_tier"),
                "description": _(
                    "Changes here and in the grid below bind every worker as soon as they are "
                    "saved. No running stream is cut."
                ),
            },
        ),
        (_("How long"), {"fields": ("max_hold", "drain", "grace")}),
        (_("State"), {"fields": ("version",)}),
    )

    class Media:
        css = {"all": ("llm_throttle/admin.css",)}  # noqa: RUF012 - Django's form

    def get_readonly_fields(
        self, request: HttpRequest, obj: Upstream | None = None
    ) -> tuple[str, ...]:
        return (*self.readonly_fields, "slug") if obj else self.readonly_fields

    @admin.display(description=_("lets in"), boolean=True, ordering="-is_paused")
    def is_open(self, upstream: Upstream) -> bool:
        return not upstream.is_paused and upstream.capacity > 0

    @admin.display(description=_("callers without a tier"))
    def without_a_tier(self, upstream: Upstream) -> str:
        """Where callers go whom no assignment and no group places."""
        tiers = list(Tier.objects.all())
        users = next((str(tier) for tier in tiers if tier.is_default), None)
        guests = next((str(tier) for tier in tiers if tier.is_anonymous), None)
        built_in = gettext("the built-in tier “%s” (weight 1, never waits)") % IMPLICIT_TIER
        return gettext("Signed-in users: %(users)s. Guests: %(guests)s.") % {
            "users": users or built_in,
            "guests": guests or built_in,
        }

    @admin.action(description=_("Pause: let nobody new in"), permissions=["change"])
    def pause(self, request: HttpRequest, queryset: QuerySet[Upstream]) -> None:
        changed = self._set_paused(request, queryset, True)
        text = ngettext("%d upstream is paused.", "%d upstreams are paused.", changed) % changed
        self.message_user(request, text, messages.SUCCESS)

    @admin.action(description=_("Resume: let callers in again"), permissions=["change"])
    def resume(self, request: HttpRequest, queryset: QuerySet[Upstream]) -> None:
        changed = self._set_paused(request, queryset, False)
        text = ngettext("%d upstream is resumed.", "%d upstreams are resumed.", changed) % changed
        self.message_user(request, text, messages.SUCCESS)

    def _set_paused(
        self, request: HttpRequest, queryset: QuerySet[Upstream], is_paused: bool
    ) -> int:
        """One by one through ``save``, which publishes the policy; the number that changed."""
        upstreams = list(queryset.exclude(is_paused=is_paused))
        for upstream in upstreams:
            upstream.is_paused = is_paused
            upstream.save(update_fields=["is_paused"])
            self.log_change(request, upstream, "Paused." if is_paused else "Resumed.")
        return len(upstreams)


# Tiers and who is in them


class TierForm(_TierForm):
    class Meta:
        error_messages = {"slug": {"invalid": SLUG_MESSAGE}}  # noqa: RUF012 - Django's form


@admin.register(Tier)
class TierAdmin(_TierAdmin):
    form = TierForm
    list_display = ("__str__", "slug", "is_default", "is_anonymous", "group_names")
    search_fields = ("slug", "name")
    filter_horizontal = ("groups",)
    fieldsets = (
        (
            None,
            {
                "fields": ("slug", "name"),
                "description": _("How much a tier may have is set at each upstream."),
            },
        ),
        (_("Who is in it"), {"fields": ("groups", "is_default", "is_anonymous")}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tier]:
        return super().get_queryset(request).prefetch_related("groups")

    def get_readonly_fields(self, request: HttpRequest, obj: Tier | None = None) -> tuple[str, ...]:
        return ("slug",) if obj else ()

    @admin.display(description=_("groups"))
    def group_names(self, tier: Tier) -> str:
        return ", ".join(group.name for group in tier.groups.all()) or "-"


@admin.register(TierAssignment)
class TierAssignmentAdmin(_TierAssignmentAdmin):
    list_display = ("user", "tier", "expires_at", "holds")
    list_filter = ("tier",)
    list_select_related = ("user", "tier")
    search_fields = (f"user__{get_user_model().USERNAME_FIELD}", "tier__slug", "tier__name")
    raw_id_fields = ("user",)

    def get_autocomplete_fields(self, request: HttpRequest) -> tuple[str, ...]:
        """The user by search where the project's user page can search, else by its id."""
        users = self.admin_site._registry.get(get_user_model())
        return ("user",) if users is not None and users.get_search_fields(request) else ()

    @admin.display(description=_("in force"), boolean=True)
    def holds(self, assignment: TierAssignment) -> bool:
        return assignment.expires_at is None or assignment.expires_at > timezone.now()
