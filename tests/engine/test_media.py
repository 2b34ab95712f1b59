"""Addresses of images in chat messages, with vLLM's own parser and its own fetcher of media."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from fleetkeeper_engine.supervisor.launch.argv import desired_argv, desired_environment
from tests.support.engine.engine_documents import a_document
from tests.support.engine.engine_environment import PYTHON
from tests.support.engine.supervised_engine import START_TIMEOUT_S
from tests.unit.engine.test_argv import LAUNCH, PLAN

PROGRAM = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.multimodal.media import MediaConnector
from vllm.utils.argparse_utils import FlexibleArgumentParser

words, urls = json.load(sys.stdin)
parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
connector = MediaConnector(allowed_media_domains=parsed.allowed_media_domains)
answers = []
for url in urls:
    try:
        connector.fetch_image(url)
        answers.append("fetched")
    except Exception as problem:
        answers.append(f"{type(problem).__name__}: {problem}")
print("\\n" + json.dumps(answers))
"""


@dataclass
class Hosts:
    """A server that is reached by two names, and redirects to itself by the other one."""

    port: int
    paths: list[str] = field(default_factory=list)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hosts.paths.append(self.path)
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{hosts.port}/second")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hosts = Hosts(server.server_address[1])
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hosts
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answers(domains: list[str], urls: list[str]) -> list[str]:
    """Return what vLLM answers to each address, started as the supervisor starts it."""
    document = a_document(engine={"mediaDomains": domains} if domains else {})
    words = desired_argv(document, PLAN, LAUNCH)
    place = next(at for at, word in enumerate(words) if word.startswith("--allowed-media-domains"))
    media = [*words[place : place + 1 + len(domains)], "--model=x"]
    redirects = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM],
        input=json.dumps([media, urls]),
        env={**os.environ, redirects: desired_environment(document, PLAN, LAUNCH, {})[redirects]},
        capture_output=True,
        text=True,
        check=False,
        timeout=START_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return [str(item) for item in found]


@pytest.mark.promise("media-domains")
def test_the_address_of_an_image_is_not_called_unless_its_host_is_listed() -> None:
    with two_hosts() as hosts:
        url = f"http://localhost:{hosts.port}/first"
        (refused,) = _answers([], [url])
        assert "must be from one of the allowed domains" in refused
        assert hosts.paths == []
        redirected, other = _answers(["localhost"], [url, f"http://127.0.0.1:{hosts.port}/other"])
    assert hosts.paths == ["/first"]
    assert "fetched" not in redirected
    assert "must be from one of the allowed domains" in other
