"""Credentials for Prometheus reach its server and nobody else: no log, no error, no settings dump."""

from __future__ import annotations

import base64
import json
import logging
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from fleetkeeper.adapters.prometheus import Prometheus, PrometheusError, PrometheusSettings
from fleetkeeper.autoscale.signals.histogram_edges import Edges
from fleetkeeper.runtime.settings import SettingsError, load_settings
from tests.support.autoscale.control_cases import NOW

CANARY = "canary/p:ss word+1"
QUOTED = "canary%2Fp%3Ass%20word%2B1"
BASIC = base64.b64encode(f"reader:{CANARY}".encode()).decode()
SECRETS = (CANARY, QUOTED, BASIC, "canary")
PODS = {("team-a", "chat-0"): Edges(0.5, 0.05)}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def assert_silent(*texts: object) -> None:
    """None of the texts holds the password in any form."""
    for text in texts:
        for secret in SECRETS:
            assert secret not in str(text), text


async def asked(handler: Handler | None, *, token_file: Path | None = None) -> None:
    """One tick with credentials in the URL; without a handler nothing listens."""
    app = web.Application()
    if handler is not None:
        app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1] if handler is not None else 9
    url = f"http://reader:{QUOTED}@127.0.0.1:{port}/"
    prometheus = Prometheus(PrometheusSettings(url, token_file=token_file))
    assert_silent(prometheus.__dict__["_settings"])
    try:
        await prometheus.observe_samples(PODS, NOW)
    finally:
        await prometheus.close()
        await runner.cleanup()


async def test_the_server_gets_the_user_and_the_password() -> None:
    """Decoded, as basic authentication; the path and the query are free of them."""
    seen: list[tuple[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.headers.get("Authorization", ""), str(request.url)))
        return web.json_response({"status": "success", "data": {"result": []}})

    await asked(handler)
    assert {header for header, _ in seen} == {f"Basic {BASIC}"}
    assert_silent(*(url for _, url in seen))


async def echo(request: web.Request) -> web.Response:
    """A proxy's error page that repeats what it was sent."""
    return web.Response(status=401, text=f"denied: {request.headers['Authorization']}")


async def redirect(request: web.Request) -> web.Response:
    """To an address with the credentials in it."""
    return web.Response(
        status=302, headers={"Location": f"http://reader:{QUOTED}@{request.host}/login"}
    )


async def garbage(request: web.Request) -> web.Response:
    """No JSON, with the credentials in it."""
    return web.Response(text=f"<html>{request.headers['Authorization']} {CANARY}")


@pytest.mark.parametrize(
    "handler", [echo, redirect, garbage, None], ids=["echo", "redirect", "garbage", "none"]
)
async def test_no_error_names_them(
    handler: Handler | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the message, nor its causes, nor what libraries log at their most talkative."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(PrometheusError) as caught:
        await asked(handler)
    shown = "".join(traceback.format_exception(caught.value))
    assert_silent(caught.value, repr(caught.value), shown, caplog.text)


@pytest.mark.parametrize("token", [f"{CANARY}\nsecond line", f"\x00{CANARY}", f"\udcff{CANARY}"])
async def test_a_token_that_is_no_header_is_not_repeated(token: str, tmp_path: Path) -> None:
    """The HTTP library's own error repeats the header."""
    file = tmp_path / "token"
    file.write_bytes(token.encode("utf-8", "surrogateescape"))

    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=500)

    with pytest.raises(PrometheusError) as caught:
        await asked(handler, token_file=file)
    assert_silent("".join(traceback.format_exception(caught.value)))


def test_settings_show_the_address_without_them() -> None:
    """In the log line at start, and wherever the settings are printed."""
    settings = load_settings(prometheus_url=f"https://reader:{QUOTED}@prometheus.example:9090/p/")
    assert settings.shown["prometheus_url"] == "https://prometheus.example:9090/p"
    assert_silent(json.dumps(settings.shown), settings, repr(settings), settings.model_dump())


@pytest.mark.parametrize(
    "line",
    [
        f"prometheusUrl: reader:{QUOTED}@prometheus",
        f"prometheusUrl: https://reader:{QUOTED}@[prometheus",
        f"prometheusUrl: https://reader:{QUOTED}@prometheus:port",
        f"prometheusUrl: https://prometheus?password={QUOTED}",
        f"prometheusUrl: [https://reader:{QUOTED}@prometheus]",
        f"prometheusUrl: https://reader:{QUOTED}@prometheus: x",
        f"prometheusUrl: http://{QUOTED}: x",
        f"prometheusUrl: {{a: 'https://reader:{QUOTED}@prometheus'}}",
    ],
)
def test_a_setting_that_is_refused_is_not_repeated(line: str, tmp_path: Path) -> None:
    """The message says which setting is wrong, or which line of the file."""
    file = tmp_path / "settings.yaml"
    file.write_text(f"workers: 8\n{line}\n")
    with pytest.raises(SettingsError, match=r"prometheus_url|line 2") as caught:
        load_settings(file)
    assert_silent("".join(traceback.format_exception(caught.value)))


SCRIPT = """
import structlog
from fleetkeeper.runtime.telemetry.logs import configure_logs
configure_logs("debug", "STYLE")
def call(password):
    raise RuntimeError("failed")
try:
    call("".join(["can", "ary"]))
except RuntimeError:
    structlog.get_logger("x").exception("a tick failed")
"""


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_traceback_in_the_log_shows_no_variables(style: str) -> None:
    """A defect of ours is logged with its frames, not with what they held."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("STYLE", style)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "RuntimeError" in done.stderr
    assert_silent(done.stderr)
