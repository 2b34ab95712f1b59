"""The arguments that an engine profile adds to vLLM's command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fleetkeeper.api.options import ALLOWED
from fleetkeeper.api.schema.error_messages import FieldError
from fleetkeeper_contract.extra_arguments import argument_errors, option_of
from fleetkeeper_contract.vllm_options import RESERVED


def options_of(arguments: Collection[str]) -> frozenset[str]:
    """Return the names of the options that arguments set, without those of malformed ones."""
    return frozenset(option for item in arguments if (option := option_of(item)))


def option_values_of(arguments: Collection[str]) -> dict[str, str]:
    """Return the options that arguments set with their values, as in `spec.engine.options`."""
    found = {}
    for item in arguments:
        name, has_value, value = item.removeprefix("--").partition("=")
        positive = name.removeprefix("no-")
        found[positive.replace("_", "-")] = (
            value if has_value else "true" if positive == name else "false"
        )
    return found


def extra_argument_errors(arguments: Collection[str]) -> list[str]:
    """Return why a profile cannot have these arguments, one line for each error.

    Abbreviations of the options of services are refused, because a service could set the same
    option by its whole name.
    """
    errors = argument_errors(arguments)
    for option in sorted(options_of(arguments) - ALLOWED.keys() - RESERVED.keys()):
        long = next((name for name in ALLOWED if name.startswith(option)), None)
        if long:
            errors.append(f"--{option} abbreviates --{long}; write the option's whole name")
    return errors


def conflict_errors(
    options: Mapping[str, str], arguments: Collection[str], profile: str
) -> list[FieldError]:
    """Return an error for each option of a service that its profile's arguments set too."""
    return [
        FieldError(
            f"spec.engine.options.{name}",
            f"is set by the engine profile {profile}; remove it or choose another profile",
        )
        for name in sorted(options_of(arguments) & options.keys())
    ]
