"""Structured logs: JSON lines for machines, colored text for people."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

LogFormat = Literal["json", "console"]
QUIET = ("aiohttp", "asyncio")
"""Libraries that log warnings and errors only."""
SILENT = ("uvicorn.error",)
"""Loggers that log errors only: uvicorn warns of each invalid request, so clients could fill the log."""


def configure_logs(level: str, style: LogFormat) -> None:
    """Send all logs, including those of libraries, through one formatter to standard error."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(sort_keys=True)
        if style == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            # The default shows the values of variables: keys and prompts.
            exception_formatter=structlog.dev.plain_traceback,
        )
    )
    if style == "json":
        shared.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    for name in SILENT:
        logging.getLogger(name).setLevel(max(logging.ERROR, root.level))
