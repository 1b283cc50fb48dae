"""What a view answers, as events: streams, plain responses, files and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import PermissionDenied
from django.http import FileResponse, Http404, HttpResponse, JsonResponse, StreamingHttpResponse
from django.test import AsyncRequestFactory

from .conftest import Room
from .event_views import RestChat, answered, read, token
from .waiting_room import settled

pytestmark = pytest.mark.usefixtures("flow_by_header")


async def test_a_plain_answer_becomes_one_event(room: Room) -> None:
    assert await answered(lambda: JsonResponse({"a": 1})) == [("message", {"a": 1}, "")]
    assert await settled()


async def test_a_text_stream_becomes_tokens_and_done(room: Room) -> None:
    def answer() -> StreamingHttpResponse:
        return StreamingHttpResponse(iter(["h\u00e9".encode()[:2], "h\u00e9".encode()[2:], b"y"]))

    found = await answered(answer)
    assert "".join(data["text"] for name, data, _ in found if name == "token") == "h\u00e9y"
    assert found[-1][0] == "done"


@pytest.mark.parametrize(
    ("error", "status"),
    [(Http404("x"), 404), (PermissionDenied("x"), 403), (ValueError("secret"), 500)],
)
async def test_an_error_of_the_handler_becomes_an_event(
    room: Room, error: Exception, status: int
) -> None:
    def answer() -> Any:
        raise error

    [(name, data, _)] = await answered(answer)
    assert (name, data["status"], data["code"]) == ("error", status, f"http_{status}")
    assert "secret" not in str(data)
    assert await settled()


async def test_a_body_that_breaks_off_ends_with_an_event(room: Room) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield token("a")
        raise ValueError("secret")

    found = await answered(lambda: StreamingHttpResponse(body(), content_type="text/event-stream"))
    assert [name for name, _, _ in found] == ["message", "error"]
    assert await settled()


async def test_an_error_response_becomes_an_event(room: Room) -> None:
    [(name, data, _)] = await answered(lambda: HttpResponse("bad model", status=400))
    assert (name, data["status"], data["content"]) == ("error", 400, "bad model")


async def test_nothing_returned_is_an_error(room: Room) -> None:
    [(name, data, _)] = await answered(lambda: None)
    assert (name, data["status"]) == ("error", 500)


async def test_a_file_is_closed(room: Room, tmp_path: Any) -> None:
    path = tmp_path / "reply.txt"
    path.write_text("from a file")
    found = await answered(lambda: FileResponse(path.open("rb")))
    assert found[0][1]["text"] == "from a file"


async def test_rest_framework_renders_inside_the_stream(room: Room) -> None:
    request = AsyncRequestFactory().post("/", headers={"Accept": "*/*"})
    response = await sync_to_async(RestChat.as_view())(request)
    assert [event[:2] for event in await read(response)][1:] == [("message", {"reply": "hello"})]
    assert await settled()
