"""Client of the pod's own vLLM: checks that it answers and generates, and reads its metrics."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import aiohttp

from fleetkeeper_engine.in_vllm.vllm_settings import INTERNAL_HEADER
from fleetkeeper_engine.spec import EngineDocument

GENERATION_TIMEOUT_S = 600.0
"""The first token may wait for compilation. The document's startup deadline applies in addition."""

PROBES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "temperature": 0}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 0},
    ),
    ("/v1/embeddings", {"input": "a"}),
    ("/classify", {"input": "a"}),
    ("/score", {"text_1": "a", "text_2": "a"}),
    ("/pooling", {"input": "a"}),
)
"""Tried in this order: the first one that the model's task supports must succeed."""
_NOT_THIS_TASK = (400, 404, 405, 501)

LOGPROBS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"logprobs": 1},
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": 1},
}
"""Fields that ask for logprobs. vLLM compiles their ranking when a request first asks for them: 15 s
on two busy CPU cores, measured with vLLM 0.32 and an empty compile cache. No step ends meanwhile."""


class EngineClient:
    """Client of vLLM on loopback. Its requests carry a token, so they skip tiers, queue and counting."""

    def __init__(self, document: EngineDocument, internal_token: str) -> None:
        host = "[::1]" if ":" in document.ports.host else "127.0.0.1"
        self._base = f"http://{host}:{document.ports.serving}"
        self._model = document.model.served_name
        self._headers = {INTERNAL_HEADER: internal_token}
        self._route = ""
        """The route that generated a token."""
        self._session: aiohttp.ClientSession | None = None

    def authorize(self, environment: Mapping[str, str] = os.environ) -> None:
        """Use the API key of vLLM, if there is one."""
        if key := environment.get("VLLM_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def answers(self, timeout_s: float = 5.0) -> bool:
        """Return whether GET /health was answered with a status below 500."""
        try:
            async with self._open().get(
                f"{self._base}/health", timeout=aiohttp.ClientTimeout(timeout_s)
            ) as response:
                return response.status < 500
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    async def generates(self) -> str | None:
        """Return None if the model completed its task for one token, else the problem in one line."""
        problem = "no generation route answered"
        for path, body in PROBES:
            try:
                status, text = await self._post(path, {"model": self._model, **body})
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                return f"POST {path}: {type(error).__name__} {error}"
            if status == 200:
                self._route = path
                return None
            problem = f"POST {path} -> {status} {text[:200]}"
            if status not in _NOT_THIS_TASK:
                return problem
        return problem

    async def warm_up(self) -> str | None:
        """Ask for logprobs once, so that vLLM compiles what they need before it gets requests.

        Returns:
            None if vLLM answered, or if the model does not generate text; otherwise the error.
        """
        fields = LOGPROBS.get(self._route)
        if fields is None:
            return None
        body = {"model": self._model, **dict(PROBES)[self._route], **fields}
        try:
            status, text = await self._post(self._route, body)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return f"POST {self._route}: {type(error).__name__} {error}"
        return None if status == 200 else f"POST {self._route} -> {status} {text[:200]}"

    async def metrics(self) -> bytes | None:
        """Return vLLM's own metrics, or None if they do not arrive within 2 s."""
        try:
            async with self._open().get(
                f"{self._base}/metrics", timeout=aiohttp.ClientTimeout(2.0)
            ) as response:
                return await response.read() if response.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError):
            return None

    async def _post(self, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        async with self._open().post(
            f"{self._base}{path}", json=body, timeout=aiohttp.ClientTimeout(GENERATION_TIMEOUT_S)
        ) as response:
            return response.status, (await response.text()).replace("\n", " ")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, trust_env=False)
        return self._session
