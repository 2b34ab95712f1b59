"""Envoy's own answers, as error objects of OpenAI's API."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

NO_REPLICA: Final = "no_replica"
"""Code of a 503: the request reached no engine, and may be sent again."""


class _Own(NamedTuple):
    """One of Envoy's own answers, by the flag of its reason or by its status."""

    flags: tuple[str, ...]
    status: int
    code: str
    message: str
    kind: str = "server_error"
    from_status: int | None = None
    """The status that Envoy chose, for answers without flags."""


_OWN: Final = (
    _Own(
        ("UH", "UO"),
        503,
        NO_REPLICA,
        "No replica of this service can take requests now. Try again soon.",
    ),
    _Own(("UF",), 503, NO_REPLICA, "No replica of this service could be reached. Try again soon."),
    _Own(
        ("UC", "UR", "LR", "UPE"),
        502,
        "replica_failed",
        "The replica that had this request ended the connection. It may have worked on it.",
    ),
    _Own(
        ("UT", "SI", "DT", "UMSDR"),
        504,
        "timeout",
        "The replica that had this request sent nothing for too long.",
    ),
    _Own(("NR",), 404, "unknown_path", "This path does not exist.", "invalid_request_error"),
    # It has no flag.
    _Own(
        (),
        503,
        NO_REPLICA,
        "The router of this service has no memory left. Try again soon.",
        from_status=503,
    ),
    _Own(
        (),
        431,
        "headers_too_large",
        "The headers are larger than 60 KiB, or more than 100.",
        "invalid_request_error",
        431,
    ),
    _Own((), 408, "timeout", "The request did not arrive in time.", "invalid_request_error", 408),
    _Own((), 400, "bad_request", "This is no valid HTTP request.", "invalid_request_error", 400),
)


FLAGS: Final = tuple(flag for own in _OWN for flag in own.flags)
"""The flags of all answers that are Envoy's own because of a replica or of memory."""


def local_replies() -> dict[str, Any]:
    """Return `local_reply_config` of Envoy's connection manager."""
    return {
        "mappers": [_mapper(own) for own in _OWN],
        "body_format": _format("server_error", "router", "%LOCAL_REPLY_BODY%"),
    }


def _mapper(own: _Own) -> dict[str, Any]:
    return {
        "filter": _filter(own),
        "status_code": own.status,
        "body_format_override": _format(own.kind, own.code, own.message),
    }


def _filter(own: _Own) -> dict[str, Any]:
    if own.from_status is None:
        return {"response_flag_filter": {"flags": list(own.flags)}}
    value = {"default_value": own.from_status, "runtime_key": f"router.own.{own.from_status}"}
    return {"status_code_filter": {"comparison": {"op": "EQ", "value": value}}}


def _format(kind: str, code: str, message: str) -> dict[str, Any]:
    error = {"message": message, "type": kind, "param": None, "code": code}
    return {"json_format": {"error": error}}
