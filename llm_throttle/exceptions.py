"""What callers may catch. Each refusal knows its reason, its HTTP status and when to come back."""

from __future__ import annotations

from http import HTTPStatus

from django.utils.translation import gettext_lazy as _

REFUSAL_STATUS = {
    "user_depth": 429,
    "tier_full": 429,
    "moved": 409,
    "queue_full": 503,
    "wait_too_long": 503,
    "wait_expired": 503,
    "paused": 503,
    "unserviceable": 503,
    "recovering": 503,
    "backend_down": 503,
    "shutting_down": 503,
    "lease_lost": 503,  # no refusal: the request was let in, and its slot was taken back
}
"""429: the caller's own share is used up. 503: the service cannot. 409: it goes on elsewhere."""

REFUSAL_DETAIL = {
    "user_depth": _("You already have as many requests waiting or running as one user may have."),
    "tier_full": _("The queue of your tier is full."),
    "moved": _("This ticket goes on in another request."),
    "queue_full": _("The waiting room is full."),
    "wait_too_long": _("All slots are taken, and the wait would be longer than your tier allows."),
    "wait_expired": _("No slot became free within the time your tier may wait."),
    "paused": _("The operator has paused this service."),
    "unserviceable": _("With the present limits nobody of your tier is let in."),
    "recovering": _("The service is starting or recovering; nothing is let in for a few seconds."),
    "backend_down": _("The waiting room is out of reach."),
    "shutting_down": _("This server is shutting down."),
    "lease_lost": _("The slot of this request was taken back."),
}


class ThrottleError(Exception):
    """Base of everything that llm_throttle raises for its callers."""


class Refused(ThrottleError):
    """The waiting room answered no.

    ``reason`` is one of the keys of ``REFUSAL_STATUS``; ``retry_after`` is whole seconds (1 to
    ``RETRY_AFTER_MAX``), or None where coming back makes no sense (``moved``).
    """

    def __init__(
        self,
        reason: str,
        *,
        upstream: str = "",
        tier: str = "",
        retry_after: int | None = None,
        ticket: str = "",
    ) -> None:
        super().__init__(f"{upstream}: {reason}")
        self.reason = reason
        self.upstream = upstream
        self.tier = tier
        self.retry_after = retry_after
        self.ticket = ticket

    @property
    def status_code(self) -> int:
        return REFUSAL_STATUS[self.reason]

    @property
    def detail(self) -> str:
        return str(REFUSAL_DETAIL[self.reason])

    def as_problem(self) -> dict[str, str | int | None]:
        """The refusal as an RFC 9457 problem: body of a response, an event or a message."""
        kind = "quota-exceeded" if self.status_code == 429 else "temporary-reduced-capacity"
        return {
            "type": f"https://iana.org/assignments/http-problem-types#{kind}",
            "title": HTTPStatus(self.status_code).phrase,
            "status": self.status_code,
            "detail": self.detail,
            "reason": self.reason,
            "upstream": self.upstream,
            "tier": self.tier,
            "retry_after": self.retry_after,
        }


class ForeignTicket(Refused):
    """The ticket to come back with is somebody else's."""

    def __init__(self, upstream: str = "") -> None:
        super().__init__("foreign_ticket", upstream=upstream)

    @property
    def status_code(self) -> int:
        return 403

    @property
    def detail(self) -> str:
        return str(_("This ticket belongs to somebody else."))


class LeaseLost(ThrottleError):
    """The slot is no longer ours; the call must end."""


class UnknownUpstream(ThrottleError, LookupError):
    """No upstream with this slug exists."""


class BackendDown(ThrottleError):
    """The shared store did not answer in time or answered with an error."""


class NestedAdmission(ThrottleError, RuntimeError):
    """This caller holds a slot of the same upstream; waiting for a second could deadlock."""
