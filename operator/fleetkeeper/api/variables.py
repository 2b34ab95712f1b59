"""Environment variables of the engine, and references to keys of Secrets."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fleetkeeper.api.base import ObjectName, Section
from fleetkeeper.api.values.form import Form

EnvironmentValue = Annotated[
    str,
    Field(max_length=1024),
    Form(r"^[ -~]*$", "must consist of printable ASCII characters on one line"),
]
VariableName = Annotated[
    str,
    Field(min_length=1, max_length=128),
    Form(
        r"^[A-Za-z_][A-Za-z0-9_]*$",
        "is not the name of a variable; use letters, digits, and underscores, such as NCCL_DEBUG",
    ),
]
SecretKeyName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Form(
        r"^\.?[-_a-zA-Z0-9][-._a-zA-Z0-9]*$",
        "is not a key of a Secret; use letters, digits, and -_., such as token",
    ),
]


class SecretKey(Section):
    """A key of a Secret in the same namespace."""

    name: ObjectName = Field(description="Name of the Secret in the service's namespace.")
    key: SecretKeyName = Field("token", description="Key in the Secret.")


class SecretKeySelector(Section):
    """A key of a Secret in the same namespace, without a default for the key."""

    name: ObjectName = Field(description="Name of the Secret in the service's namespace.")
    key: SecretKeyName = Field(
        description="Key in the Secret. It must exist: a replica does not start without it."
    )


class VariableSource(Section):
    """The source of a variable's value."""

    secret_key_ref: SecretKeySelector = Field(
        description="Key of a Secret. Pods reference it by name; the operator never reads it. A changed value reaches new pods only."
    )


class EnvironmentVariable(Section):
    """An environment variable of the engine. Exactly one of `value` and `value_from` is set."""

    name: VariableName = Field(description="Name of the variable. The profile must allow it.")
    value: EnvironmentValue | None = Field(None, description="Value of the variable.")
    value_from: VariableSource | None = Field(
        None,
        description="Source of the value, for values that must not be in the spec, for example the URL of a proxy with its password. The profile must list the exact name of the variable.",
    )
