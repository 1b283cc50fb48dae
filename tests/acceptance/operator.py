"""An operator at the real admin pages: reads the form as a browser does, and sends it back."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode

from demo_project.load_client import Address, Answer, cookies, fetch

FIELDS = ("cap", "reserved", "weight", "wait_budget", "queue_depth", "depth_per_user")


class Form(HTMLParser):
    """The values that a browser would send."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.values: dict[str, str] = {}
        self._select = ""
        self._textarea = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = given.get("name") or ""
        if tag == "input" and name and "__prefix__" not in name:
            kind = given.get("type")
            if kind in ("checkbox", "radio") and "checked" not in given:
                return
            if kind not in ("submit", "button", "file"):
                self.values[name] = given.get("value") or ("on" if kind == "checkbox" else "")
        elif tag == "select":
            self._select = name
        elif tag == "option" and "selected" in given:
            self.values[self._select] = given.get("value") or ""

    def row_of(self, tier_id: str) -> str:
        """The prefix of the row of a tier in the grid."""
        for name, value in self.values.items():
            if re.fullmatch(r"limits-\d+-tier", name) and value == tier_id:
                return name.removesuffix("tier")
        raise LookupError(tier_id)


class Operator:
    """Signed in as ``admin``."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.cookies: dict[str, str] = {}

    async def log_in(self) -> None:
        page = await self._get("/admin/login/")
        form = Form(page.body.decode()).values
        answer = await self._post(
            "/admin/login/", form | {"username": "admin", "password": "admin", "next": "/admin/"}
        )
        assert answer.status == 302, answer

    async def edit(
        self,
        every_tier: dict[str, Any] | None = None,
        tiers: dict[str, dict[str, Any]] | None = None,
        **values: Any,
    ) -> Answer:
        """Change fields of the upstream and of its tiers' rows, and save."""
        path = f"/admin/llm_throttle/upstream/{await self._id('upstream', 'anthropic')}/change/"
        form = Form((await self._get(path)).body.decode())
        sent = dict(form.values)
        for name, value in values.items():
            if value is False:
                sent.pop(name, None)
            else:
                sent[name] = "on" if value is True else str(value)
        for cell, value in (every_tier or {}).items():
            rows = [name for name in sent if re.fullmatch(rf"limits-\d+-{cell}", name)]
            sent |= dict.fromkeys(rows, str(value))
        for tier, cells in (tiers or {}).items():
            prefix = form.row_of(await self._id("tier", tier))
            sent |= {prefix + name: str(value) for name, value in cells.items()}
        answer = await self._post(path, sent)
        assert answer.status == 302, _errors(answer)
        return answer

    async def delete_tier(self, slug: str) -> Answer:
        path = f"/admin/llm_throttle/tier/{await self._id('tier', slug)}/delete/"
        form = Form((await self._get(path)).body.decode()).values
        answer = await self._post(path, form | {"post": "yes"})
        assert answer.status == 302, _errors(answer)
        return answer

    async def delete_upstream(self) -> Answer:
        path = f"/admin/llm_throttle/upstream/{await self._id('upstream', 'anthropic')}/delete/"
        form = Form((await self._get(path)).body.decode()).values
        answer = await self._post(path, form | {"post": "yes"})
        assert answer.status == 302, _errors(answer)
        return answer

    async def hold_edit(self, capacity: int, seconds: float, end: str) -> Answer:
        """Set the capacity in a transaction that stays open; *end* it by commit or rollback."""
        form = {"csrfmiddlewaretoken": self.cookies["csrftoken"]}
        sent = {"capacity": str(capacity), "hold": str(seconds), "end": end}
        return await self._post("/case/edit/", form | sent)

    async def _id(self, model: str, slug: str) -> str:
        """The primary key of the row whose line in the list names this slug."""
        page = (await self._get(f"/admin/llm_throttle/{model}/")).body.decode()
        for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL):
            found = re.search(rf"/{model}/(\d+)/change/", row)
            if found and re.search(rf">{slug}<", row):
                return found[1]
        raise LookupError(f"{model} {slug}")

    async def _get(self, path: str) -> Answer:
        return await self._send("GET", path)

    async def _post(self, path: str, form: dict[str, str]) -> Answer:
        return await self._send("POST", path, urlencode(form).encode())

    async def _send(self, method: str, path: str, body: bytes = b"") -> Answer:
        headers = {
            "Cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items()),
            "Content-Type": "application/x-www-form-urlencoded",
        }
        answer = await fetch(self.address, method, path, headers=headers, body=body)
        self.cookies |= cookies(answer)
        return answer


def _errors(answer: Answer) -> str:
    found = re.findall(r'class="errorlist[^>]*>(.*?)</ul>', answer.body.decode(), re.DOTALL)
    return f"{answer.status}: {found}"
