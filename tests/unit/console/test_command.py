"""`fleetkeeper console` as a process, with a kubeconfig whose API server is away."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from tests.support.console.console_page import console_process
from tests.support.guards import GUARD_S


@contextmanager
def console(tmp_path: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command, with a kubeconfig for a port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "kubeconfig").write_text(f"""\
apiVersion: v1
kind: Config
current-context: away
contexts: [{{name: away, context: {{cluster: away, user: nobody}}}}]
clusters: [{{name: away, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: nobody, user: {{}}}}]
""")
    with console_process(tmp_path / "kubeconfig", *options) as process:
        yield process


@pytest.mark.slow
def test_the_page_says_why_there_is_no_data_and_ctrl_c_stops_it(tmp_path: Path) -> None:
    with console(tmp_path, "--interval", "1") as process:
        assert process.stdout is not None
        process.stdout.readline()
        link = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/open\?token=[\w-]{32}", link)
        browser = build_opener(HTTPCookieProcessor(CookieJar()))
        assert b"Open the console" in browser.open(link, timeout=GUARD_S).read()
        data, end = link.partition("open?")[0] + "fleet.json", time.monotonic() + GUARD_S
        while b"cannot list InferenceServices of http://127.0.0.1:" not in (
            seen := browser.open(data, timeout=GUARD_S).read()
        ):
            assert time.monotonic() < end, seen
            time.sleep(0.1)
        assert b"check the kubeconfig" in seen
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=GUARD_S)
        assert (process.returncode, out, err) == (0, "", "stopped\n")


@pytest.mark.exhaustive
def test_a_url_that_is_none_is_refused_and_not_repeated(tmp_path: Path) -> None:
    """It may hold a password."""
    with console(tmp_path, "--prometheus", "ftp://user:secret@prometheus") as process:
        out, err = process.communicate(timeout=GUARD_S)
    assert (process.returncode, out) == (2, "")
    assert "--prometheus" in err
    assert "must be a URL such as" in err
    assert "secret" not in err


@pytest.mark.exhaustive
def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with console(tmp_path, "--port", str(port)) as process:
            out, err = process.communicate(timeout=GUARD_S)
    assert (process.returncode, out) == (1, "")
    assert err.startswith(f"cannot serve at 127.0.0.1:{port}: ")
    assert err.endswith("set --port to a free port\n")
