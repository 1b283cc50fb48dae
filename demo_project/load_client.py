"""A light HTTP/1.1 client for chats, so that hundreds of them cost the machine next to nothing.

Standard library only. ``python -m demo_project.load_client`` plays a plan of calls that it reads
from standard input; see ``Plan``.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlencode

# Django compares the cookie with the header; a client that makes up both needs no page first.
CSRF_TOKEN = "x" * 32
SESSION_COOKIE = "sessionid"
CSRF_COOKIE = "csrftoken"
PROGRESS_SECONDS = 2.0

Address = tuple[str, int]
OnEvent = Callable[[dict[str, Any]], object]


def address_of(url: str) -> Address:
    """Where a server answers whose URL is ``http://host:port``."""
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


class BrokenAnswer(Exception):
    """The server closed the connection in the middle of an answer, or sent no HTTP."""


@dataclass(slots=True)
class Answer:
    """What one request brought. Times are seconds from the moment before connecting."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)
    first_token: float | None = None
    elapsed: float = 0.0
    error: str | None = None

    def __repr__(self) -> str:
        return f"<Answer {self.status} after {self.elapsed:.2f} s: {self.error or self.text!r}>"

    @property
    def text(self) -> str:
        return "".join(event["text"] for event in self.events if event.get("type") == "token")

    @property
    def is_complete(self) -> bool:
        """Whether it is a definite answer: a refusal, or a stream up to its end."""
        if self.error is not None or not self.status:
            return False
        return self.status != 200 or any(event.get("type") == "done" for event in self.events)

    @property
    def waited_ms(self) -> int:
        return int(self.headers.get("x-llm-throttle-waited-ms", 0))

    @property
    def reason(self) -> str:
        """Why the request was refused, or ``http_<status>`` where it does not say."""
        try:
            return str(json.loads(self.body)["reason"])
        except (ValueError, KeyError, TypeError):
            return f"http_{self.status}"


async def chat(
    address: Address,
    message: str,
    *,
    session: str = "",
    sdk: str = "anthropic",
    path: str = "/chat/",
    timeout: float = 120.0,  # noqa: ASYNC109 - it ends up in the answer, not in an exception
    on_event: OnEvent | None = None,
) -> Answer:
    """Send one message and read its reply to the end; *on_event* sees each event as it comes.

    Cancelling the task closes the connection at once, as a client does that leaves.
    """
    body = json.dumps({"message": message, "sdk": sdk}).encode()
    headers = {
        "Content-Type": "application/json",
        "Cookie": f"{SESSION_COOKIE}={session}; {CSRF_COOKIE}={CSRF_TOKEN}",
        "X-CSRFToken": CSRF_TOKEN,
    }
    return await fetch(
        address, "POST", path, headers=headers, body=body, timeout=timeout, on_event=on_event
    )


async def fetch(
    address: Address,
    method: str,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    timeout: float = 60.0,  # noqa: ASYNC109 - as above
    on_event: OnEvent | None = None,
) -> Answer:
    """One request on a connection of its own. What goes wrong is told in ``Answer.error``."""
    answer = Answer()
    started = time.perf_counter()
    try:
        async with asyncio.timeout(timeout):
            await _exchange(
                address,
                _request(address, method, path, headers or {}, body),
                answer,
                started,
                on_event,
            )
    except (OSError, BrokenAnswer, asyncio.IncompleteReadError) as error:
        answer.error = str(error) or type(error).__name__
    answer.elapsed = time.perf_counter() - started
    return answer


async def _exchange(
    address: Address, request: bytes, answer: Answer, started: float, on_event: OnEvent | None
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request)
        await _read_head(reader, answer)
        is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        unread = b""
        async for chunk in _read_chunks(reader, answer.headers):
            answer.body += chunk
            if is_stream:
                *complete, unread = (unread + chunk).split(b"\n\n")
                for event in filter(None, map(parse_event, complete)):
                    _keep(event, answer, started)
                    if on_event is not None:
                        on_event(event)
    finally:
        writer.transport.abort()  # nothing is left to send, and a leaving client does not wait


def _keep(event: dict[str, Any], answer: Answer, started: float) -> None:
    if answer.first_token is None and event.get("type") == "token":
        answer.first_token = time.perf_counter() - started
    answer.events.append(event)


def _request(
    address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes
) -> bytes:
    lines = {
        "Host": f"{address[0]}:{address[1]}",
        "Connection": "close",
        "Content-Length": str(len(body)),
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def _read_head(reader: asyncio.StreamReader, answer: Answer) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    try:
        answer.status = int(head[0].split()[1])
    except (IndexError, ValueError):
        raise BrokenAnswer(f"not HTTP: {head[0]!r}") from None
    for line in filter(None, head[1:]):
        name, _, value = line.partition(":")
        key = name.lower()
        # Cookies come one a line; other headers do not repeat here.
        before = answer.headers.get(key)
        answer.headers[key] = f"{before}\n{value.strip()}" if before else value.strip()


async def _read_chunks(
    reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).strip() or b"-1", 16):
            if size < 0:
                raise BrokenAnswer("the stream broke off")
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        yield await reader.read()


def parse_event(block: bytes) -> dict[str, Any] | None:
    """The JSON of one server-sent event, None for a comment."""
    data = [line[5:].strip() for line in block.splitlines() if line.startswith(b"data:")]
    return json.loads(b"\n".join(data)) if data else None


# Signing in as a browser does.


def cookies(answer: Answer) -> dict[str, str]:
    """The cookies that an answer sets."""
    lines = answer.headers.get("set-cookie", "").splitlines()
    return dict(line.split(";")[0].split("=", 1) for line in lines)


async def sign_in(address: Address, username: str, password: str) -> str:
    """The session key of an account."""
    page = "/accounts/login/"
    token = cookies(await fetch(address, "GET", page))[CSRF_COOKIE]
    form = {"username": username, "password": password, "csrfmiddlewaretoken": token}
    headers = {
        "Content-Type": "application/x-www-form-urlencoded",
        "Cookie": f"{CSRF_COOKIE}={token}",
    }
    answer = await fetch(address, "POST", page, headers=headers, body=urlencode(form).encode())
    try:
        return cookies(answer)[SESSION_COOKIE]
    except KeyError:
        raise BrokenAnswer(f"{username} could not sign in ({answer.status})") from None


async def visit(address: Address) -> str:
    """The session key that a guest gets with the chat page."""
    return cookies(await fetch(address, "GET", "/"))[SESSION_COOKIE]


# Playing a plan.


@dataclass(frozen=True, slots=True)
class Client:
    """Somebody who chats as *session* and comes *at* so many seconds after the start."""

    tier: str
    session: str
    at: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Who comes when. With *seconds* each client comes back after a pause until they are over.

    A pause is uniform from 0 to twice *think* seconds; a refused client waits its Retry-After.
    """

    address: Address
    clients: list[Client]
    path: str = "/chat/"
    seconds: float = 0.0
    think: float = 1.0
    seed: int = 0
    timeout: float = 120.0

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        values = json.loads(text)
        values["clients"] = [Client(**client) for client in values["clients"]]
        values["address"] = tuple(values["address"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One call of a plan, in milliseconds."""

    tier: str
    is_granted: bool
    reason: str  # why it was refused, or what went wrong
    is_answered: bool
    waited_ms: float  # for a slot, or for the refusal
    first_token_ms: float | None
    elapsed_ms: float

    @classmethod
    def of(cls, tier: str, answer: Answer) -> Outcome:
        is_granted = answer.status == 200
        elapsed_ms = answer.elapsed * 1000
        first = answer.first_token
        return cls(
            tier=tier,
            is_granted=is_granted,
            reason="" if is_granted else answer.error or answer.reason,
            is_answered=answer.is_complete,
            waited_ms=answer.waited_ms if is_granted else elapsed_ms,
            first_token_ms=None if first is None else first * 1000,
            elapsed_ms=elapsed_ms,
        )


class Player:
    """Plays a plan and keeps what every call brought."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.chance = random.Random(plan.seed)  # noqa: S311 - pauses, not secrets
        self.offered = 0
        self.outcomes: list[Outcome] = []

    async def play(self) -> list[Outcome]:
        self.started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            progress = group.create_task(self._report())
            async with asyncio.TaskGroup() as clients:
                for client in self.plan.clients:
                    clients.create_task(self._follow(client))
            progress.cancel()
        return self.outcomes

    async def _follow(self, client: Client) -> None:
        await asyncio.sleep(client.at)
        while True:
            answer = await self._call(client)
            pause = self._pause(answer)
            if self._seconds() + pause >= self.plan.seconds:
                return
            await asyncio.sleep(pause)

    async def _call(self, client: Client) -> Answer:
        self.offered += 1
        answer = await chat(
            self.plan.address,
            f"Hello from a {client.tier} client",
            session=client.session,
            path=self.plan.path,
            timeout=self.plan.timeout,
        )
        self.outcomes.append(Outcome.of(client.tier, answer))
        return answer

    def _pause(self, answer: Answer) -> float:
        pause = self.chance.uniform(0, 2 * self.plan.think)
        return max(pause, float(answer.headers.get("retry-after", 0)))

    def _seconds(self) -> float:
        return time.perf_counter() - self.started

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            sys.stderr.write(
                f"{self._seconds():6.1f} s: {self.offered} offered, {len(self.outcomes)} answered\n"
            )


def main() -> None:
    plan = Plan.from_json(sys.stdin.read())
    outcomes = asyncio.run(Player(plan).play())
    json.dump([asdict(outcome) for outcome in outcomes], sys.stdout)


if __name__ == "__main__":
    main()
