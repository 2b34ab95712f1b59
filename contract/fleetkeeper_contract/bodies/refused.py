"""Refusals of a body. Their texts are for its client, and hold nothing of the body."""

from __future__ import annotations

from typing import Final

MAX_DEPTH: Final = 64
"""Levels of lists and objects."""
MAX_VALUES: Final = 20_000
"""Values in lists and objects. Lists of token numbers do not count."""


class RefusedBodyError(ValueError):
    """A body that is refused. The message is for its client."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def not_json(reason: str) -> RefusedBodyError:
    """Return the refusal of what is not JSON."""
    return RefusedBodyError(400, "invalid_json", f"The body is not JSON in UTF-8: {reason}.")


def too_deep() -> RefusedBodyError:
    """Return the refusal of a body that is nested too deeply."""
    return RefusedBodyError(
        400, "too_deep", f"The body is nested more than {MAX_DEPTH} levels deep."
    )


def too_many_values() -> RefusedBodyError:
    """Return the refusal of a body with too many lists, objects and values."""
    return RefusedBodyError(
        400,
        "too_many_values",
        f"The body has more than {MAX_VALUES} values. Send less in one request; "
        "only prompt, input and tokens may hold long lists of token numbers.",
    )


def repeated_name() -> RefusedBodyError:
    """Return the refusal of an object with a name that is there twice."""
    return RefusedBodyError(
        400,
        "duplicate_field",
        "A name is there twice in one object of the body, so two readers could disagree. Send it once.",
    )
