"""What a client may send to the chat, judged before it costs a slot or a place in the queue."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest, JsonResponse, RawPostDataException, UnreadablePostError

MAX_BODY = 64 * 1024  # bytes
MAX_MESSAGE = 8_000  # characters
SDKS = ("anthropic", "openai")


class BadPrompt(Exception):
    """A request that is refused with a 4xx."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.title = title

    def as_response(self) -> JsonResponse:
        problem = {"type": "about:blank", "title": self.title, "status": self.status}
        return JsonResponse(
            {**problem, "detail": str(self)},
            status=self.status,
            content_type="application/problem+json",
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One message and the SDK that is to carry it to the provider."""

    message: str
    sdk: str = SDKS[0]

    @classmethod
    def from_request(cls, request: HttpRequest) -> Self:
        return cls.from_json(read_json(read_body(request)))

    @classmethod
    def from_json(cls, value: Any) -> Self:
        if not isinstance(value, dict):
            raise bad("The body must be a JSON object.")
        sdk = value.get("sdk", SDKS[0])
        if sdk not in SDKS:
            raise bad(f"“sdk” must be one of {', '.join(SDKS)}.")
        return cls(checked_message(value.get("message")), sdk)


def checked_message(message: Any) -> str:
    if not isinstance(message, str) or not message.strip():
        raise bad("“message” must be a text that is not empty.")
    if len(message) > MAX_MESSAGE:
        raise too_large(f"“message” may have at most {MAX_MESSAGE:,} characters.")
    try:
        message.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        raise bad("“message” holds characters that are not Unicode.") from None
    return message


def read_body(request: HttpRequest) -> bytes:
    limit = f"The body may have at most {MAX_BODY:,} bytes."
    length = request.headers.get("Content-Length", "")
    if length.isdigit() and int(length) > MAX_BODY:
        raise too_large(limit)
    try:
        body = request.body
    except RequestDataTooBig:
        raise too_large(limit) from None
    except (UnreadablePostError, RawPostDataException):
        raise bad("The body must be JSON, not a form or half of one.") from None
    if len(body) > MAX_BODY:
        raise too_large(limit)
    return body


def read_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise bad('The body must be JSON, for example {"message": "Hello"}.') from None


def bad(detail: str) -> BadPrompt:
    return BadPrompt(400, "Bad request", detail)


def too_large(detail: str) -> BadPrompt:
    return BadPrompt(413, "Content too large", detail)
