"""`fleetkeeper batch` against a server that speaks OpenAI's API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fleetkeeper import cli
from fleetkeeper.commands.batch import input_file
from fleetkeeper.commands.batch.input_file import check_file
from fleetkeeper.commands.batch.model import Counts
from fleetkeeper.commands.batch.progress import Pace, duration, in_words
from fleetkeeper.exit_codes import ExitCode
from fleetkeeper_gateway.batch import model
from fleetkeeper_gateway.batch.validation.worker import MAX_LINE_BYTES
from fleetkeeper_local.common.paths import REPOSITORY
from tests.support.batch.batch_api_server import KEY, BatchServer, batch_server

pytestmark = pytest.mark.slow

ENDPOINT = "/v1/chat/completions"
Refusal = tuple[int, dict[str, Any], dict[str, str]]


@pytest.fixture
def server() -> Iterator[BatchServer]:
    with batch_server() as state:
        yield state


def run(server: BatchServer | None, *words: str, key: str = KEY) -> Result:
    environment = {"FLEETKEEPER_API_KEY": key, "FLEETKEEPER_URL": server.url if server else ""}
    return CliRunner().invoke(cli.app, ["batch", *words], env=environment)


def line(custom_id: str, **changes: Any) -> bytes:
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]}
    request = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps({**request, **changes}).encode() + b"\n"


def written(directory: Path, *lines: bytes) -> Path:
    path = directory / "requests.jsonl"
    path.write_bytes(b"".join(lines))
    return path


# -- submit -----------------------------------------------------------------------------------------


def test_submit_uploads_the_bytes_and_prints_the_id_alone(
    server: BatchServer, tmp_path: Path
) -> None:
    path = written(tmp_path, line("a"), b"\n", line("b", body={"model": "chat", "x": "é\u2028"}))
    done = run(server, "submit", str(path), "--window", "4h", "--metadata", "job=nightly=1")
    assert done.exit_code == 0, done.output
    assert done.stdout == "batch_0\n"
    assert server.files == {"file-0": path.read_bytes()}
    batch = server.batches["batch_0"]
    assert (batch["input_file_id"], batch["endpoint"]) == ("file-0", ENDPOINT)
    assert (batch["completion_window"], batch["metadata"]) == ("4h", {"job": "nightly=1"})


def test_a_large_file_arrives_whole(server: BatchServer, tmp_path: Path) -> None:
    """Longer than any buffer on the way."""
    filler = "x" * 100_000
    lines = [line(str(n), body={"model": "chat", "prompt": filler}) for n in range(100)]
    path = written(tmp_path, *lines)
    done = run(server, "submit", str(path), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["id"] == "batch_0"
    assert server.files["file-0"] == path.read_bytes()


def test_submit_waits_for_the_end(server: BatchServer, tmp_path: Path) -> None:
    counts = {"total": 1, "completed": 1, "failed": 0}
    server.steps["batch_0"] = [
        {"status": "in_progress", "request_counts": {**counts, "completed": 0}},
        {"status": "completed", "request_counts": counts},
    ]
    path = written(tmp_path, line("a"))
    done = run(server, "submit", str(path), "--wait", "--interval", "0.1")
    assert done.exit_code == 0, done.output
    assert done.stdout == "batch_0\n"
    assert "created batch_0" in done.stderr
    assert server.steps["batch_0"] == []


def test_mistakes_are_told_once(server: BatchServer) -> None:
    mistake = {"line": None, "code": "too_many_lines", "message": "It has 50,001 lines."}
    server.add_batch("batch_a", status="failed", failed_at=1, errors={"data": [mistake]})
    for words in (("--watch",), ("--watch", "--json")):
        done = run(server, "status", "batch_a", *words)
        assert done.exit_code == ExitCode.FAILED
        told = "It has 50,001 lines. (too_many_lines)"
        assert (done.stdout + done.stderr).count(told) == 1
    assert "deadline" not in run(server, "status", "batch_a").stdout


@pytest.mark.parametrize("end", ["failed", "expired", "cancelled"])
def test_waiting_fails_if_the_batch_does(server: BatchServer, tmp_path: Path, end: str) -> None:
    mistake = {"line": 3, "code": "invalid_json", "message": "is not JSON"}
    server.steps["batch_0"] = [{"status": end, "errors": {"data": [mistake]}}]
    path = written(tmp_path, line("a"))
    done = run(server, "submit", str(path), "--wait", "--interval", "0.1")
    assert done.exit_code == ExitCode.FAILED
    assert "line 3: is not JSON (invalid_json)" in done.stderr
    assert f"batch_0 is {end}" in done.stderr


def test_a_file_that_is_of_no_use_is_deleted_again(server: BatchServer, tmp_path: Path) -> None:
    """It would count to the quota of the key."""
    server.refuse_creation = "completion_window is not supported"
    done = run(server, "submit", str(written(tmp_path, line("a"))), "--window", "1y")
    assert done.exit_code == ExitCode.FAILED
    assert "completion_window is not supported" in done.stderr
    assert server.files == {}


def test_a_quota_is_not_waited_for(server: BatchServer, tmp_path: Path) -> None:
    refusal = {"error": {"message": "Your key has 3 files, and may have 3. Delete some."}}
    server.refusals = [(429, refusal, {"x-should-retry": "false"})]
    done = run(server, "submit", str(written(tmp_path, line("a"))))
    assert done.exit_code == ExitCode.FAILED
    assert done.stderr.endswith(": 429 Your key has 3 files, and may have 3. Delete some.\n")


def test_a_creation_without_an_answer_is_told_with_its_file(
    server: BatchServer, tmp_path: Path
) -> None:
    path = written(tmp_path, line("a"))
    created = {"id": "file-7", "object": "file", "bytes": 1}
    server.refusals = [(200, created, {}), (503, {}, {"Retry-After": "7"})]
    done = run(server, "submit", str(path))
    assert done.exit_code == ExitCode.FAILED
    assert "try again in 7 s" in done.stderr
    assert "file-7" in done.stderr
    assert "DELETE /v1/files/file-7" not in server.asked


# -- the check before it is sent --------------------------------------------------------------------

BAD = {
    b"\xff\xfe\n": "is not UTF-8 at byte 0",
    b"{]\n": "is not JSON",
    b"\x0c\n": "is not JSON",
    line("\ud800"): "half of a surrogate pair",
    line("b", body={"model": "\ud800"}): "half of a surrogate pair",
    b"[1]\n": "is not a JSON object",
    line(""): "custom_id must be a text",
    line("x" * 513): "1 to 512 characters",
    b'{"custom_id": "b", "custom_id": "b"}\n': "a name twice",
    b'{"custom_id": NaN}\n': "it has NaN",
    b'{"custom_id": ' + b"9" * 5000 + b"}\n": "too many digits",
    line("a"): "custom_id 'a' is that of line 1 too",
    line("b", method="GET"): "method is 'GET'",
    line("b", url="/v1/embeddings"): "url is '/v1/embeddings'",
    line("b", body=[]): "body is not an object",
    line("b", body={}): "body.model must be a text",
    line("b", body={"model": "other"}): "all lines must name 'chat'",
    line("b", body={"model": "chat", "stream": True}): "body.stream is set",
    b"[" * 200_000 + b"\n": "is nested too deeply",
}


@pytest.mark.parametrize(("bad", "message"), BAD.items())
def test_a_mistake_is_told_with_its_line_and_nothing_is_sent(
    server: BatchServer, tmp_path: Path, bad: bytes, message: str
) -> None:
    path = written(tmp_path, line("a"), b"\n", bad)
    done = run(server, "submit", str(path))
    assert done.exit_code == ExitCode.BAD_INPUT, done.output
    assert f"{path}:3: " in done.stderr
    assert message in done.stderr
    assert done.stdout == ""
    assert server.asked == []


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    """Editors of some systems write one."""
    path = written(
        tmp_path, input_file.BOM + line("a"), line("b", body={"model": "chat", "stream": False})
    )
    found = check_file(path, ENDPOINT)
    assert (found.mistakes, found.lines, found.model) == ([], 2, "chat")


def test_the_example_has_no_mistake() -> None:
    found = check_file(REPOSITORY / "examples/batch/requests.jsonl", ENDPOINT)
    assert (found.mistakes, found.lines) == ([], 3)


def test_many_mistakes_are_counted(server: BatchServer, tmp_path: Path) -> None:
    done = run(server, "submit", str(written(tmp_path, *[b"x\n"] * 30)))
    assert done.exit_code == ExitCode.BAD_INPUT
    assert len(done.stderr.splitlines()) == input_file.SHOWN + 1
    assert "30 mistakes, of which 10 are not shown; nothing was uploaded" in done.stderr


def test_the_bounds_are_those_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (input_file.MAX_LINES, input_file.MAX_BYTES) == (model.MAX_LINES, model.MAX_FILE_BYTES)
    path = written(tmp_path, line("a"), line("b"), line("c"))
    assert check_file(path, ENDPOINT).mistakes == []
    assert input_file.MAX_LINE_BYTES == MAX_LINE_BYTES
    monkeypatch.setattr(input_file, "MAX_LINE_BYTES", len(line("a")) - 2)
    assert "has more than" in check_file(path, ENDPOINT).mistakes[0]
    monkeypatch.setattr(input_file, "MAX_LINE_BYTES", len(line("a")) - 1)
    monkeypatch.setattr(input_file, "MAX_LINES", 2)
    assert "3 lines; a file has at most 2" in check_file(path, ENDPOINT).mistakes[0]
    monkeypatch.setattr(input_file, "MAX_BYTES", 10)
    assert "a file has at most 10" in check_file(path, ENDPOINT).mistakes[0]


def test_a_file_without_lines_or_no_file(server: BatchServer, tmp_path: Path) -> None:
    done = run(server, "submit", str(written(tmp_path, b"\n\n")))
    assert (done.exit_code, "no line" in done.stderr) == (ExitCode.BAD_INPUT, True)
    done = run(server, "submit", str(tmp_path / "none.jsonl"))
    assert (done.exit_code, "No such file" in done.stderr) == (ExitCode.NO_INPUT, True)


# -- status and cancel ------------------------------------------------------------------------------


def test_status_lists_all_pages(server: BatchServer) -> None:
    for number in range(250):
        server.add_batch(f"batch_{number}")
    done = run(server, "status", "--limit", "230", "--json")
    found = [batch["id"] for batch in json.loads(done.stdout)]
    assert found == [f"batch_{number}" for number in range(249, 19, -1)]
    table = run(server, "status").stdout.splitlines()
    assert len(table) == 21
    assert table[1].startswith("batch_249")


def test_status_tells_a_batch(server: BatchServer) -> None:
    counts = {"total": 2000, "completed": 1500, "failed": 20}
    server.add_batch("batch_a", status="in_progress", request_counts=counts, metadata={"a": "b"})
    done = run(server, "status", "batch_a")
    assert done.exit_code == 0, done.output
    assert "batch_a  in_progress" in done.stdout
    assert "1,520 of 2,000 (76%), 20 failed" in done.stdout
    assert "a=b" in done.stdout
    assert (
        json.loads(run(server, "status", "batch_a", "--json").stdout) == server.batches["batch_a"]
    )


@pytest.mark.promise("batch-texts")
def test_text_of_the_server_reaches_no_terminal_as_control_characters(server: BatchServer) -> None:
    server.add_batch("batch_a", metadata={"a": "\x1b[31mred\n"})
    server.add_batch("batch_b", endpoint="[red]\x1b[31m")
    assert "\x1b" not in run(server, "status", "batch_a").stdout
    listed = run(server, "status").stdout
    assert "\x1b" not in listed
    assert "[red]" in listed


def test_watching_outlives_an_outage(server: BatchServer) -> None:
    """The batch goes on while the server is replaced."""
    server.add_batch("batch_a", status="in_progress")

    def refusals() -> Iterator[Refusal]:
        for status in (502, 503, 429, 500):
            yield status, {"error": {"message": "not now"}}, {}

    first: Refusal = (200, dict(server.batches["batch_a"]), {})
    server.refusals = [first, *refusals()]
    server.steps["batch_a"] = [{"status": "completed"}]
    done = run(server, "status", "batch_a", "--watch", "--interval", "0.1", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["status"] == "completed"
    assert server.refusals == []


def test_watching_ends_when_the_server_refuses(server: BatchServer) -> None:
    server.add_batch("batch_a", status="in_progress")
    first: Refusal = (200, dict(server.batches["batch_a"]), {})
    server.refusals = [first, (401, {"error": {"message": "expired"}}, {})]
    done = run(server, "status", "batch_a", "--watch", "--interval", "0.1")
    assert done.exit_code == ExitCode.FAILED
    assert "401 expired; check FLEETKEEPER_API_KEY" in done.stderr


def test_cancel_asks_for_the_end(server: BatchServer) -> None:
    server.add_batch("batch_a", status="in_progress")
    done = run(server, "cancel", "batch_a")
    assert done.exit_code == 0, done.output
    assert "batch_a  cancelling" in done.stdout
    assert server.asked == ["POST /v1/batches/batch_a/cancel"]


# -- fetch ------------------------------------------------------------------------------------------


def test_fetch_writes_both_files_and_prints_their_paths(
    server: BatchServer, tmp_path: Path
) -> None:
    server.ended("batch_a", b'{"a": 1}\n' * 100_000, b'{"b": 2}\n')
    out = tmp_path / "new" / "results"
    done = run(server, "fetch", "batch_a", "-o", str(out))
    assert done.exit_code == 0, done.output
    paths = [out / "batch_a_output.jsonl", out / "batch_a_error.jsonl"]
    assert done.stdout.splitlines() == [str(path) for path in paths]
    assert paths[0].read_bytes() == b'{"a": 1}\n' * 100_000
    assert sorted(out.iterdir()) == sorted(paths)
    # Readable to whom other new files are.
    (tmp_path / "other").touch()
    assert paths[0].stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_transfer_that_broke_leaves_nothing_and_is_repeated(
    server: BatchServer, tmp_path: Path
) -> None:
    server.ended("batch_a", b'{"a": 1}\n' * 100_000, b'{"b": 2}\n')
    server.cut.add("file-err")
    done = run(server, "fetch", "batch_a", "-o", str(tmp_path))
    assert done.exit_code == ExitCode.FAILED
    assert "file-err/content" in done.stderr
    output = tmp_path / "batch_a_output.jsonl"
    assert list(tmp_path.iterdir()) == [output]
    server.asked.clear()
    done = run(server, "fetch", "batch_a", "-o", str(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    error = tmp_path / "batch_a_error.jsonl"
    assert json.loads(done.stdout) == {"output_file": str(output), "error_file": str(error)}
    assert error.read_bytes() == b'{"b": 2}\n'
    assert "GET /v1/files/file-out/content" not in server.asked


def test_another_file_is_not_overwritten(server: BatchServer, tmp_path: Path) -> None:
    server.ended("batch_a", b'{"a": 1}\n')
    path = tmp_path / "batch_a_output.jsonl"
    path.write_text("mine")
    done = run(server, "fetch", "batch_a", "-o", str(tmp_path))
    assert done.exit_code == ExitCode.FAILED
    assert "exists with 4 bytes" in done.stderr
    assert path.read_text() == "mine"


def test_a_server_does_not_choose_the_path(server: BatchServer, tmp_path: Path) -> None:
    server.ended("batch_a", b'{"a": 1}\n')["id"] = "../batch_b"
    out = tmp_path / "results"
    done = run(server, "fetch", "batch_a", "-o", str(out))
    assert done.exit_code == ExitCode.FAILED, done.output
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_that_appears_meanwhile_is_not_overwritten(
    server: BatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.ended("batch_a", b'{"a": 1}\n')
    path = tmp_path / "batch_a_output.jsonl"
    sync = os.fsync

    def late(file: int) -> None:
        path.write_text("mine")
        sync(file)

    monkeypatch.setattr(os, "fsync", late)
    done = run(server, "fetch", "batch_a", "-o", str(tmp_path))
    assert done.exit_code == ExitCode.FAILED, done.output
    assert "exists with 4 bytes" in done.stderr
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_cannot_be_written_is_named(server: BatchServer, tmp_path: Path) -> None:
    server.ended("batch_a", b'{"a": 1}\n')
    (tmp_path / "file").touch()
    done = run(server, "fetch", "batch_a", "-o", str(tmp_path / "file"))
    assert done.exit_code == ExitCode.FAILED
    assert f"cannot write to {tmp_path / 'file'}" in done.stderr


def test_a_batch_that_has_not_ended_has_no_files(server: BatchServer, tmp_path: Path) -> None:
    server.add_batch("batch_a", status="finalizing")
    done = run(server, "fetch", "batch_a", "-o", str(tmp_path))
    assert done.exit_code == ExitCode.NOT_YET
    assert "batch status batch_a --watch" in done.stderr
    assert done.stdout == ""


# -- the official client --------------------------------------------------------------------------


def test_the_example_with_the_official_client(server: BatchServer, tmp_path: Path) -> None:
    """examples/batch/run_batch.py, as a reader runs it."""
    result = {"custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}
    server.ended("batch_x", json.dumps(result).encode() + b"\n")
    server.steps["batch_1"] = [
        {"status": "completed", "output_file_id": "file-out", "error_file_id": None}
    ]
    done = subprocess.run(
        [
            sys.executable,
            REPOSITORY / "examples/batch/run_batch.py",
            written(tmp_path, line("a")),
            "0.1",
        ],
        env={"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": KEY, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'a {"status_code": 200, "body": {}}\n'
    assert "completed" in done.stderr


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("status", "../keys"), "no ID of a batch"),
        (("status", "--watch"), "--watch needs the ID"),
        (("submit", "x.jsonl", "--metadata", "nightly"), "must be KEY=VALUE"),
        (("status", "--url", "llm.example.com"), "--url is 'llm.example.com'"),
    ],
)
def test_wrong_arguments(server: BatchServer, words: tuple[str, ...], message: str) -> None:
    done = run(server, *words)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert message in done.stderr
    assert server.asked == []


@pytest.mark.parametrize(("key", "message"), [("", "is not set"), ("a\nb", "characters")])
def test_the_key_comes_from_its_variable(server: BatchServer, key: str, message: str) -> None:
    done = run(server, "status", key=key)
    assert done.exit_code == ExitCode.USAGE
    assert f"FLEETKEEPER_API_KEY {message}" in done.stderr or message in done.stderr
    assert run(None, "status").exit_code == ExitCode.USAGE


def test_a_server_that_is_not_there_is_named() -> None:
    done = run(BatchServer(url="http://127.0.0.1:9"), "status")
    assert done.exit_code == ExitCode.FAILED
    assert "http://127.0.0.1:9/v1/batches" in done.stderr
    assert "check --url (or FLEETKEEPER_URL)" in done.stderr


@pytest.mark.promise("batch-texts")
def test_the_key_follows_no_redirection(server: BatchServer) -> None:
    server.refusals = [(307, {}, {"Location": "http://127.0.0.1:9/v1/batches"})]
    done = run(server, "status")
    assert done.exit_code == ExitCode.FAILED
    assert "redirects to http://127.0.0.1:9/v1/batches" in done.stderr


def test_the_server_gets_nothing_that_belongs_to_another_one(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reads these variables; the headers of one may even have a key."""
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer secret\nX-Other: secret")
    for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID"):
        monkeypatch.setenv(f"OPENAI_{name}", "secret")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    done = run(server, "status")
    assert done.exit_code == 0, done.output
    (headers,) = server.headers
    assert headers["authorization"] == f"Bearer {KEY}"
    assert "secret" not in str(headers)


def test_a_redirection_of_an_upload_or_a_download_is_refused(
    server: BatchServer, tmp_path: Path
) -> None:
    server.ended("batch_a", b"{}\n")
    file: Refusal = (200, {"id": "file-out", "object": "file", "bytes": 3}, {})
    away: Refusal = (308, {}, {"Location": f"{server.url}/v1/batches"})
    server.refusals = [away]
    assert "308" in run(server, "submit", str(written(tmp_path, line("a")))).stderr
    server.refusals = [(200, dict(server.batches["batch_a"]), {}), file, away]
    done = run(server, "fetch", "batch_a", "-o", str(tmp_path / "out"))
    assert (done.exit_code, "redirects to" in done.stderr) == (ExitCode.FAILED, True)
    assert len(server.asked) == 4
    assert list((tmp_path / "out").iterdir()) == []


def test_texts_of_errors_reach_no_terminal_as_control_characters(server: BatchServer) -> None:
    for status, body, headers in (
        (400, {"error": {"message": "\x1b[31mred\x07"}}, {}),
        (503, {}, {"Retry-After": "\x1b[31m"}),
        (307, {}, {"Location": "/\x1b[31m"}),
    ):
        server.refusals = [(status, body, headers)]
        done = run(server, "status", "batch_a")
        assert done.exit_code == ExitCode.FAILED
        assert str(status) in done.stderr
        assert done.stderr.strip().isprintable()


def test_without_the_client_the_command_says_what_to_install(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's image does not have it."""
    monkeypatch.delitem(sys.modules, "fleetkeeper.commands.batch.server", raising=False)
    monkeypatch.setitem(sys.modules, "openai", None)
    done = run(server, "status")
    assert done.exit_code == ExitCode.NOT_INSTALLED
    assert "pip install 'fleetkeeper[batch]'" in done.stderr
    assert run(server, "--help").exit_code == 0


@pytest.mark.parametrize(
    "words", [("status",), ("status", "batch_a"), ("cancel", "batch_a"), ("fetch", "batch_a")]
)
@pytest.mark.parametrize("told", [{}, {"id": "batch_a", "status": None}, {"data": [{"id": 1}]}])
def test_an_answer_of_another_api_is_told(
    server: BatchServer, words: tuple[str, ...], told: dict[str, Any]
) -> None:
    server.refusals = [(200, told, {})]
    done = run(server, *words)
    assert done.exit_code == ExitCode.FAILED, done.output
    assert "check --url (or FLEETKEEPER_URL)" in done.stderr


@pytest.mark.parametrize("url", ["http://[", "http://", "https://127.0.0.1:x/"])
def test_a_url_that_is_none_is_told(url: str) -> None:
    done = run(BatchServer(url=url), "status")
    assert done.exit_code == ExitCode.FAILED, done.output
    assert "check --url (or FLEETKEEPER_URL)" in done.stderr


def test_a_page_that_is_no_api_is_told(server: BatchServer) -> None:
    server.refusals = [(599, {}, {})]
    assert "599" in run(server, "status", "batch_a").stderr
    done = run(server, "status", "batch_a", key="other")
    assert "401 Incorrect API key provided; check FLEETKEEPER_API_KEY" in done.stderr
    assert "404 No such thing" in run(server, "cancel", "batch_none").stderr


# -- figures ----------------------------------------------------------------------------------------


def test_the_rate_is_that_of_the_last_minute() -> None:
    pace, counts = Pace(), Counts(1000, 290, 10)
    assert pace.per_s is None
    assert in_words(counts, pace) == "300/1,000 lines, 10 failed"
    for second in range(0, 100, 10):
        pace.see(second, 0)
    pace.see(100, 300)
    assert pace.per_s == 300 / 60
    assert pace.remaining_s(counts) == 140
    assert in_words(counts, pace) == "300/1,000 lines, 10 failed, 5.0/s, about 2m 20s left"


def test_a_batch_that_stands_still_has_no_end() -> None:
    pace = Pace()
    pace.see(0, 5)
    pace.see(10, 5)
    assert pace.remaining_s(Counts(10, 5, 0)) is None
    assert in_words(Counts(10, 5, 0), pace) == "5/10 lines, 0.0/s"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0s"), (59, "59s"), (60, "1m 0s"), (3725, "1h 2m"), (90_000, "1d 1h"), (-5, "0s")],
)
def test_durations_have_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_an_error_that_is_a_text_is_shown(server: BatchServer) -> None:
    """Some proxies before a server send no object."""
    server.refusals = [(404, {"error": "no route for this path"}, {})]
    done = run(server, "status", "batch_a")
    assert "404 no route for this path" in done.stderr
