"""`fleetkeeper usage`: from files, and from a process that answers over HTTP."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner, Result

from fleetkeeper import cli
from fleetkeeper.commands.keys.usage import parse_when
from fleetkeeper.exit_codes import ExitCode
from fleetkeeper_contract.usage_files import BadUsageQueryError

pytestmark = pytest.mark.slow

HOUR = "2025-11-25T23"
SINCE = ("--since", "2025-11-25T00:00:00Z", "--until", "2025-11-26T12:00:00Z")
PLACE = {"namespace": "team", "service": "chat", "model": "m"}
TOKENS = {"prompt": 10, "cached": 4, "answer": 5}


def a_sum(key: str | None, **more: Any) -> dict[str, Any]:
    counts = {"requests": 2, "aborted": 1, **TOKENS}
    return {"hour": HOUR, **PLACE, "tier": "standard", "key": key, **counts, **more}


def lost_line() -> dict[str, Any]:
    return {"hour": HOUR, "namespace": "team", "service": "chat", "lost": 3, **TOKENS}


def write(directory: Path, *lines: dict[str, Any], rest: str = "") -> Path:
    commit: dict[str, Any] = {"cursors": []}
    text = "".join(json.dumps(line) + "\n" for line in (*lines, commit))
    (directory / f"{HOUR}.jsonl").write_text(text + rest)
    return directory


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["usage", *words])


def test_csv_tells_attributed_unattributed_and_lost(tmp_path: Path) -> None:
    directory = write(
        tmp_path,
        a_sum("alice"),
        a_sum("alice", tier="batch"),
        a_sum("bob", model="=cmd|x"),
        a_sum(None),
        lost_line(),
        rest=json.dumps(a_sum("alice")) + "\n",  # no commit follows: a crash cut it off
    )
    done = run(*SINCE, "--dir", str(directory), "--csv")
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert [(row["kind"], row["key"], row["model"]) for row in rows] == [
        ("attributed", "alice", "m"),
        ("attributed", "bob", "'=cmd|x"),
        ("unattributed", "", ""),
        ("lost", "", ""),
    ]
    assert [row["requests"] for row in rows] == ["4", "2", "2", "3"]
    assert [row["answer"] for row in rows] == ["10", "5", "5", "5"]


def test_json_and_the_table_tell_the_same(tmp_path: Path) -> None:
    directory = write(tmp_path, a_sum("alice", prompt=1_234_567), a_sum(None), lost_line())
    words = (*SINCE, "--dir", str(directory), "--by", "service,key")
    found = json.loads(run(*words, "--json").stdout)
    assert found["rows"] == [
        {"service": "team/chat", "key": "alice", "requests": 2, "aborted": 1}
        | {"prompt": 1_234_567, "cached": 4, "answer": 5}
    ]
    assert found["lost"] == {"entries": 3, **TOKENS}
    table = run(*words).stdout
    assert "SERVICE" in table
    assert "1,234,567" in table
    assert "unattributed" in table


@pytest.mark.parametrize("model", ["[/bold]m", "[red]m", "org/m[awq]", "m\x1b[31m", "m\n"])
def test_the_table_shows_names_of_models_as_they_are(tmp_path: Path, model: str) -> None:
    """A tenant's engine names them. Control characters would reach the terminal."""
    done = run("--dir", str(write(tmp_path, a_sum("k", model=model))), *SINCE)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.stdout
    row = done.stdout.splitlines()[1]
    assert row.split()[:3] == [
        "attributed",
        "k",
        "".join(c if c.isprintable() else "?" for c in model),
    ]


def test_hours_outside_the_time_do_not_count(tmp_path: Path) -> None:
    directory = write(tmp_path, a_sum("alice"), a_sum("alice", hour="2025-11-24T23"))
    found = json.loads(run(*SINCE, "--dir", str(directory), "--json").stdout)
    assert [row["requests"] for row in found["rows"]] == [2]


@contextmanager
def a_process(answer: bytes, promised: int | None = None) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            if promised is not None:
                self.send_header("Content-Length", str(promised))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_process_is_asked_for_the_time_and_the_dimensions() -> None:
    document = {"rows": [], "unattributed": {"requests": 1, "aborted": 0, **TOKENS}}
    document["lost"] = {"entries": 0, **TOKENS}
    with a_process(json.dumps(document).encode()) as (url, asked):
        done = run(*SINCE, "--url", url, "--by", "tier", "--csv")
    assert done.exit_code == 0, done.output
    query = parse_qs(urlsplit(asked[0]).query)
    assert query == {"since": ["1764028800"], "until": ["1764158400"], "by": ["tier"]}
    assert done.stdout.splitlines()[1] == "unattributed,,1,0,10,4,5"


def test_an_answer_that_breaks_off_is_told_in_a_line() -> None:
    with a_process(b"{", promised=100) as (url, _):
        done = run("--url", url)
    assert done.exit_code == ExitCode.FAILED
    assert "cannot read usage" in done.output


@pytest.mark.parametrize("answer", [b"<html>", b"{}", b"[]", b""])
def test_an_answer_that_is_no_usage_is_refused(answer: bytes) -> None:
    with a_process(answer) as (url, _):
        done = run("--url", url)
    assert done.exit_code == ExitCode.FAILED
    assert url in done.output


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--by", "user"), ExitCode.USAGE, "key, model, tier, service"),
        (("--by", "key,key"), ExitCode.USAGE, "each once"),
        (("--since", "yesterday"), ExitCode.USAGE, "30d"),
        (("--since", "2025-11-25T00:00:00"), ExitCode.USAGE, "--since"),
        (("--csv", "--json"), ExitCode.USAGE, "exclude"),
        (("--dir", "/nonexistent"), ExitCode.FAILED, "/nonexistent"),
        (("--url", "ftp://x"), ExitCode.FAILED, "http://"),
        (("--url", "http://127.0.0.1:9"), ExitCode.FAILED, "127.0.0.1:9"),
        (("--url", "http://127.0.0.1:x"), ExitCode.FAILED, "127.0.0.1:x"),
        (("--url", "http://[::1"), ExitCode.FAILED, "[::1"),
    ],
)
def test_mistakes_are_told_in_a_line(words: tuple[str, ...], code: ExitCode, told: str) -> None:
    done = run(*words)
    assert done.exit_code == code
    assert told in done.output
    assert "Traceback" not in done.output


def test_times_are_ago_or_absolute() -> None:
    assert parse_when("since", "2d", 200_000.0) == 200_000.0 - 172_800
    assert parse_when("since", "90m", 10_000.0) == 10_000.0 - 5_400
    assert parse_when("since", "9d", 100.0) == 0.0
    assert parse_when("since", "1970-01-01T01:00:00+01:00", 0.0) == 0.0
    with pytest.raises(BadUsageQueryError):
        parse_when("since", "9999999d", 0.0)
