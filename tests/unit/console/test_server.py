"""The console's server answers its own browser alone, and never writes."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib import resources

import pytest

from fleetkeeper.console.samples import Samples
from fleetkeeper.console.server import HEADERS, PAGES, serving
from fleetkeeper.console.session import COOKIE, Session
from fleetkeeper.fleet.source import Fleet
from fleetkeeper.fleet.view import Gauges
from tests.support.console.console_fleet import HOSTILE_MESSAGE, samples_until

NOW = 1_790_000_000.0


@dataclass
class Answer:
    """An answer of the server."""

    status: int
    headers: dict[str, str]
    body: str


@dataclass
class Console:
    """A running console, and plain HTTP: a client library would tidy up paths and headers."""

    port: int
    session: Session
    samples: Samples
    cookie: str = ""

    async def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """Send a request below the prefix, or to an absolute path."""
        target = path if path.startswith("/") else f"{self.session.prefix}/{path}"
        sent = {"Host": f"127.0.0.1:{self.port}", "Connection": "close"}
        if self.cookie:
            sent["Cookie"] = f"{COOKIE}={self.cookie}"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [
            f"{method} {target} HTTP/1.1",
            *(f"{name}: {value}" for name, value in sent.items()),
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write("\r\n".join([*lines, "", ""]).encode())
        raw = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        head, _, body = raw.partition("\r\n\r\n")
        status, *rows = head.split("\r\n")
        found = dict(row.split(": ", 1) for row in rows)
        return Answer(int(status.split()[1]), found, body)

    async def open(self) -> Answer:
        """Open the link and keep the cookie, as a browser does."""
        answer = await self.ask(self.session.link)
        self.cookie = answer.headers["Set-Cookie"].split(";")[0].partition("=")[2]
        return answer


@pytest.fixture
async def console() -> AsyncIterator[Console]:
    """A console with a recorded fleet; its link is not opened yet."""
    samples, session = samples_until(NOW, 3), Session()
    async with serving(samples, session) as port:
        yield Console(port, session, samples)


@pytest.mark.promise("console-access")
async def test_the_link_gives_its_cookie_once(console: Console) -> None:
    link = console.session.link
    answer = await console.open()
    assert answer.status == 200
    for part in ("HttpOnly", "SameSite=Strict", f"Path={console.session.prefix}/"):
        assert part in answer.headers["Set-Cookie"]
    assert f"url={console.session.prefix}/" in answer.body
    assert "token" not in answer.body
    assert (await console.ask("")).status == 200

    again = await console.ask(link)
    assert (again.status, "Set-Cookie" in again.headers) == (200, False), "in the same browser"
    console.cookie = ""
    other = await console.ask(link)
    assert (other.status, "Set-Cookie" in other.headers) == (403, False)
    assert "start it again for a new link" in other.body


async def test_head_spends_no_token(console: Console) -> None:
    answer = await console.ask(console.session.link, "HEAD")
    assert (answer.status, answer.body, "Set-Cookie" in answer.headers) == (200, "", False)
    assert (await console.open()).status == 200


@pytest.mark.parametrize("token", ["", "?token=", "?token=x", "?token=%C3%A9", "?token=%00"])
async def test_a_wrong_token_opens_nothing_and_spends_nothing(console: Console, token: str) -> None:
    answer = await console.ask(f"open{token}")
    assert (answer.status, "Set-Cookie" in answer.headers) == (403, False)
    assert (await console.open()).status == 200


async def test_nothing_is_served_without_the_cookie(console: Console) -> None:
    paths = [
        "",
        *PAGES,
        "fleet.json",
        "service.json?namespace=team-a&name=chat",
        "history.json?namespace=team-a&name=chat&hours=1",
        "/",
        "/favicon.ico",
    ]
    for opened in (False, True):
        for cookie in ("", "x", "é"):
            console.cookie = cookie
            for path in paths:
                answer = await console.ask(path)
                assert (answer.status, "team-a" in answer.body) == (403, False), (path, opened)
        if not opened:
            await console.open()


@pytest.mark.promise("console-access")
@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}", ""])  # fmt: skip
async def test_another_host_is_refused(console: Console, host: str) -> None:
    """A name of somebody else that points to 127.0.0.1."""
    link = console.session.link
    await console.open()
    for path in (link, "fleet.json"):
        answer = await console.ask(path, Host=host.format(port=console.port))
        assert (answer.status, "chat" in answer.body) == (421, False)


async def test_localhost_is_the_same_host(console: Console) -> None:
    await console.open()
    assert (await console.ask("fleet.json", Host=f"localhost:{console.port}")).status == 200


async def test_two_hosts_are_refused(console: Console) -> None:
    await console.open()
    twice = f"127.0.0.1:{console.port}\r\nHost: evil.example"
    assert (await console.ask("fleet.json", Host=twice)).status in (400, 421)


@pytest.mark.promise("console-access")
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1:{port}"])  # fmt: skip
async def test_another_origin_is_refused(console: Console, origin: str) -> None:
    await console.open()
    answer = await console.ask("fleet.json", Origin=origin.format(port=console.port))
    assert (answer.status, "chat" in answer.body) == (403, False)
    own = await console.ask("fleet.json", Origin=f"http://127.0.0.1:{console.port}")
    assert own.status == 200
    assert not [name for name in own.headers if name.startswith("Access-Control")]


@pytest.mark.promise("console-access")
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
async def test_only_get_and_head_are_answered(console: Console, method: str) -> None:
    link = console.session.link
    for path in (link, "", "fleet.json", "/"):
        answer = await console.ask(path, method)
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert (await console.open()).status == 200, "no method spent the token"


@pytest.mark.promise("console-texts")
async def test_every_answer_has_the_headers(console: Console) -> None:
    link = console.session.link
    answers = [
        await console.ask("fleet.json"),
        await console.ask(link, "HEAD"),
        await console.open(),
    ]
    etag = (await console.ask("fleet.json")).headers["ETag"]
    answers += [
        *[await console.ask(path) for path in ("", *PAGES, "fleet.json", "none", "/none")],
        await console.ask("fleet.json", If_None_Match=etag),
        await console.ask("", "POST"),
        await console.ask("", Host="evil.example"),
    ]
    assert {answer.status for answer in answers} == {200, 304, 403, 404, 405, 421}
    for answer in answers:
        assert HEADERS.items() <= answer.headers.items()
        assert "'unsafe" not in answer.headers["Content-Security-Policy"]
    policy = HEADERS["Content-Security-Policy"]
    for part in (
        "default-src 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ):
        assert part in policy


@pytest.mark.parametrize("path", ["../session.py", "..%2fsession.py", "%2e%2e/server.py", "pages/app.js", "app.js/", "//etc/passwd", ".", "%00"])  # fmt: skip
async def test_no_path_leads_out_of_the_page(console: Console, path: str) -> None:
    await console.open()
    answer = await console.ask(f"{console.session.prefix}/{path}")
    assert answer.status in (400, 403, 404)
    assert "import" not in answer.body


async def test_an_unchanged_document_is_not_sent_twice(console: Console) -> None:
    await console.open()
    first = await console.ask("fleet.json")
    same = await console.ask("fleet.json", If_None_Match=first.headers["ETag"])
    assert (same.status, same.body) == (304, "")
    console.samples.fail("the API server is away", NOW + 5)
    changed = await console.ask("fleet.json", If_None_Match=first.headers["ETag"])
    document = json.loads(changed.body)
    assert changed.status == 200
    assert (document["problem"], document["taken"]) == ("the API server is away", NOW)
    assert document["services"] == json.loads(first.body)["services"], "the last data stays"


@pytest.mark.promise("console-texts")
async def test_hostile_texts_and_figures_are_valid_json(console: Console) -> None:
    """No text of a tenant is in HTML; JSON knows neither NaN nor an unescaped line separator."""
    await console.open()
    answer = await console.ask("fleet.json")
    assert answer.headers["Content-Type"].startswith("application/json")
    assert HOSTILE_MESSAGE in {row["message"] for row in json.loads(answer.body)["services"]}
    assert answer.body.isascii()
    name = "<b>&\"'"
    odd = {
        "metadata": {"namespace": "a", "name": name},
        "spec": {"objectives": {"queueWaitMilliseconds": 1}},
    }
    gauges: Gauges = {
        ("signal_queue_wait_seconds", ()): math.nan,
        ("signal_batch_time_seconds", ()): math.inf,
    }
    console.samples.add(Fleet([odd], {("a", name): gauges}), NOW + 5)
    body = (await console.ask("service.json?namespace=a&name=%3Cb%3E%26%22'")).body
    service = json.loads(body, parse_constant=pytest.fail)["service"]
    assert service["name"] == name
    assert set(service["series"]["queueWait"]) == {None}


async def test_a_service_that_does_not_exist_is_null(console: Console) -> None:
    await console.open()
    for query in ("?namespace=team-a&name=none", "?namespace=&name=", ""):
        assert json.loads((await console.ask(f"service.json{query}")).body)["service"] is None


async def test_a_port_in_use_is_an_error(console: Console) -> None:
    with pytest.raises(OSError, match="in use"):
        async with serving(Samples(), Session(), console.port):
            pass


@pytest.mark.promise("console-texts")
def test_no_script_makes_markup_of_text() -> None:
    """The browser would refuse it (trusted types); the page must not try."""
    pages = resources.files("fleetkeeper.console").joinpath("pages")
    assert {page.name for page in pages.iterdir()} == set(PAGES)
    for name in ("app.js", "charts.js", "history.js"):
        script = pages.joinpath(name).read_text()
        assert not re.findall(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|\.on\w+ =",
            script,
        )


def test_sessions_are_not_alike() -> None:
    one, other = Session(), Session()
    assert one.prefix != other.prefix
    token = one.link.partition("token=")[2]
    assert other.spend(token) is None
    cookie = one.spend(token)
    assert cookie is not None
    assert one.knows(cookie)
    assert one.link == ""
    assert not other.knows(cookie)
