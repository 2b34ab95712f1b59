"""vLLM arguments that an engine profile adds: their form, and that they set no reserved option.

The operator checks them when it loads its profiles, the engine again when it reads its document.
vLLM's parser accepts `_` for `-`, sub-fields (`--name.field=value`), `--no-NAME`, and any unambiguous
beginning of a name, so the checks compare normalized names and their beginnings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fleetkeeper_contract.vllm_options import Setter, refused

MAX_ARGUMENTS = 32
MAX_LENGTH = 2048
"""Characters of an argument. All of them fit into one environment variable (128 KiB)."""

_FORM = re.compile(
    r"--(?P<name>[a-z][a-z0-9_-]*)(?P<field>(\.[A-Za-z0-9_-]+)+\+?)?(=(?P<value>.*))?"
)


def option_of(argument: str) -> str | None:
    """Return the option that an argument sets, normalized; None if the argument is malformed.

    Worked example: `--no-compilation_config.mode=3` sets `compilation-config`.
    """
    found = _FORM.fullmatch(argument)
    return found["name"].replace("_", "-").removeprefix("no-") if found else None


def argument_errors(arguments: Iterable[str]) -> list[str]:
    """Return why arguments cannot be added to vLLM's command line, one line for each error."""
    errors: list[str] = []
    fields: dict[str, set[str]] = {}
    for argument in arguments:
        error = _malformed(argument) or _reserved(option_of(argument) or "")
        if error is None:
            seen = fields.setdefault(option_of(argument) or "", set())
            field = _field_of(argument)
            # vLLM's parser drops a whole option if fields of it are set too.
            if seen and (not field or "" in seen or field in seen):
                error = "is set twice; set it once, or each of its fields once"
            seen.add(field)
        if error:
            errors.append(f"{_shown(argument)} {error}")
    return errors


def _field_of(argument: str) -> str:
    found = _FORM.fullmatch(argument)
    return (found["field"] or "") if found else ""


def _malformed(argument: str) -> str | None:
    found = _FORM.fullmatch(argument)
    if found is None or not argument.isprintable():
        return "is malformed; write --name or --name=value as one string of printable characters"
    if len(argument) > MAX_LENGTH:
        return f"is longer than {MAX_LENGTH} characters"
    if found["field"] and found["value"] is None:
        # vLLM's parser would take the next argument as the value.
        return "needs a value; write --name.field=value"
    if re.search(r"\$[$(]", argument):
        return "contains $( or $$, which Kubernetes would replace"
    return None


def _reserved(option: str) -> str | None:
    """Return the error of an option that is reserved, or a beginning of one that is."""
    row = refused(option, Setter.PROFILE)
    if row is None:
        return None
    if row.name == option or (row.name.endswith("-") and option.startswith(row.name)):
        return f"{row.reason}; remove it"
    return f"can mean --{row.name}, which {row.reason}; write the option's whole name or remove it"


def _shown(argument: str) -> str:
    """Return the argument without its value, which may be long."""
    text = argument.partition("=")[0]
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable if len(printable) <= 64 else f"{printable[:61]}..."
