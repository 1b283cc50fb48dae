"""Guests of the demo are told apart by their session instead of by their address."""

from __future__ import annotations

import hashlib

from llm_throttle.identity import Caller
from llm_throttle.identity import resolve_flow as resolve_flow_by_address


def resolve_flow(caller: Caller) -> str:
    """One flow per user, and one per session of a guest.

    Everybody in a demo comes from the same address, which would make all guests one flow. That is
    still how a guest without a session is known.
    """
    if caller.session_key is not None and not caller.is_signed_in:
        # Operators see flows; who knows a session key can take the session over.
        return "guest:" + hashlib.sha256(caller.session_key.encode()).hexdigest()[:16]
    return resolve_flow_by_address(caller)
