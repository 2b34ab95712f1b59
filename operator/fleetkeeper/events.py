"""The watch of InferenceServices by kopf, which passes their events to the cache.

This is the only module that imports kopf, and kopf only watches. Its change-detecting handlers would
write annotations and finalizers, and its timers cost one PATCH per object. kopf never retries an
`on.event` handler that raises, so the handler here only passes events on. Every registry and setting
is explicit: no global state of kopf is used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, cast

import aiohttp
import kopf

from fleetkeeper.adapters.kubernetes.kopf_session import DecodableResponse
from fleetkeeper.api.names import GROUP, PLURAL, VERSION

SERVER_TIMEOUT_S: Final = 290
"""The server ends a watch after this time, and kopf resumes it where it was."""
INACTIVITY_S: Final = 70.0
"""Bookmarks arrive about every minute: a watch that is silent for longer is dead."""

PAGE_SIZE: Final = 4
"""Objects that kopf decodes at a time. Each may take 1.5 MiB, and decoded 14 times as much."""
_ADDRESS: Final = ("name", "namespace", "uid", "resourceVersion")


class ServiceSink(Protocol):
    """The receiver of events."""

    def changed(self, live: Mapping[str, Any]) -> None:
        """Handle an added or modified service."""

    def deleted(self, live: Mapping[str, Any]) -> None:
        """Handle a deleted service."""

    def relisted(self) -> None:
        """Handle a finished list, which does not show what was deleted."""


async def watch_services(
    sink: ServiceSink,
    *,
    namespaces: tuple[str, ...],
    kubeconfig: Path | None,
    after_start: Callable[[], None],
) -> None:
    """Watch InferenceServices until cancelled, in `namespaces` or, if there are none, in all.

    kopf replaces the signal handlers of the process. `after_start` is called then, to restore them.

    Raises:
        Exception: the error with which kopf ended, for example one inside a watch. The process must
            end too, otherwise it would run without receiving events.
    """
    tasks = await kopf.spawn_tasks(
        registry=_registry(sink, kubeconfig),
        settings=_settings(),
        # Peering is off, but kopf looks up a user name for it, and a container's user has none.
        identity="fleetkeeper",  # type: ignore[arg-type] # a NewType of str that kopf does not export
        standalone=True,
        clusterwide=not namespaces,
        namespaces=namespaces,
    )
    after_start()
    await kopf.run_tasks(tasks, ignored=_Everything())
    raise WatchEnded("the watch of InferenceServices ended")


class WatchEnded(RuntimeError):
    """The end of kopf without an error."""


class _Everything(Collection[asyncio.Task[Any]]):
    """The tasks that kopf must not cancel when it ends: all, because the process ends with it."""

    def __contains__(self, task: object) -> bool:
        return True

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _registry(sink: ServiceSink, kubeconfig: Path | None) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**kwargs: Any) -> kopf.AiohttpSession | None:  # noqa: ANN401 -- kopf's own kwargs
        """Log in with the kubeconfig if set, else the service account; kopf calls this at each 401."""
        if kubeconfig is not None:
            os.environ["KUBECONFIG"] = str(kubeconfig)
            return _session(kopf.login_with_kubeconfig(**kwargs))
        return _session(
            kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
        )

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def on_event(event: kopf.RawEvent, **_: Any) -> None:  # noqa: ANN401 -- kopf's own kwargs
        live = cast("dict[str, Any]", event["object"])
        if event["type"] == "DELETED":
            sink.deleted(live)
        else:
            sink.changed(live)
        _shed(live)
        if event["type"] is None:
            sink.relisted()

    return registry


def _session(info: kopf.ConnectionInfo | None) -> kopf.AiohttpSession | None:
    """Return kopf's own session for these credentials, with responses that can all be decoded."""
    if info is None:
        return None
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=info.trust_env,
        response_class=DecodableResponse,
    )
    return kopf.AiohttpSession(
        aiohttp_session=session,
        server=info.server,
        default_namespace=info.default_namespace,
        priority=info.priority,
        expiration=info.expiration,
    )


def _shed(live: dict[str, Any]) -> None:
    """Drop everything but the address of an object: kopf keeps it until its worker has been idle."""
    metadata = live["metadata"]
    kept = {name: metadata[name] for name in _ADDRESS if name in metadata}
    for name in live.keys() - {"apiVersion", "kind"}:
        del live[name]
    live["metadata"] = kept


class _NoDiffs(kopf.DiffBaseStorage):
    """A diff storage that compares nothing: kopf otherwise copies every object at every event."""

    def build(self, *, body: kopf.Body, extra_fields: object = None) -> kopf.BodyEssence:
        del body, extra_fields
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        del body

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = SERVER_TIMEOUT_S
    settings.watching.client_timeout = SERVER_TIMEOUT_S + 10
    settings.watching.inactivity_timeout = INACTIVITY_S
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = PAGE_SIZE
    # An object that waits for a worker stays in memory whole; a waiting worker keeps only its address.
    settings.queueing.worker_limit = None
    settings.queueing.idle_timeout = 0.1
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.process.ultimate_exiting_timeout = None
    return settings
