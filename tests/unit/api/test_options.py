"""The allow-list of engine options: what is on it passes as one word, and nothing else does."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fleetkeeper.api.options import ALLOWED, argument, newer_value_errors, option_errors
from fleetkeeper.api.profiles.defaults import default_catalog
from fleetkeeper.api.profiles.errors import profile_errors
from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper_contract.vllm_options import RESERVED, Setter
from fleetkeeper_engine.spec import Engine

NAMES = st.sampled_from(sorted(ALLOWED))
FORBIDDEN = sorted(
    {
        *(name for name, row in RESERVED.items() if Setter.SERVICE not in row.setters),
        "additional-config",
        "allowed-origins",
        "compilation-config",
        "cpu-offload-gb",
        "enable-prompt-embeds",
        "hf-config-path",
        "io-processor-plugin",
        "kv-offloading-size",
        "model-class-overrides",
        "profiler-config",
        "skip-mm-profiling",
        "spec-model",
        "tool-server",
        "trust-request-chat-template",
    }
)


def good_pairs() -> list[tuple[str, str]]:
    return [(name, value) for name, option in ALLOWED.items() for value in option.takes.examples()]


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_every_allowed_option_takes_its_own_examples_as_one_word(name: str) -> None:
    for value in ALLOWED[name].takes.examples():
        word = argument(name, value)
        assert re.fullmatch(r"--[a-z0-9][a-z0-9-]*(=[A-Za-z0-9._/:@-]+)?", word), word


@pytest.mark.promise("engine-options")
@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_loads_code_opens_files_binds_or_is_set_by_fleetkeeper_is_refused(name: str) -> None:
    assert name not in ALLOWED
    for value in ("true", "1", "x"):
        assert option_errors({name: value})


def test_an_option_with_a_field_of_its_own_names_that_field() -> None:
    (error,) = option_errors({"max-num-seqs": "3"})
    assert (
        str(error)
        == "spec.engine.options.max-num-seqs: is set by batching.maxSequences; remove the option and use that field"
    )


def test_a_mistyped_option_gets_the_name_that_was_meant() -> None:
    assert "did you mean enforce-eager?" in str(option_errors({"enforce_eager": "true"})[0])


def test_the_profile_may_narrow_the_list() -> None:
    assert not option_errors({"seed": "1"})
    assert option_errors({"seed": "1"}, allowed_by_profile=("block-size",))


def test_all_mistakes_are_reported_at_once() -> None:
    errors = option_errors(
        {"seed": "x", "--host": "0.0.0.0", "block-size": "17", "spec-method": "mtp"}
    )
    names = [error.path.rpartition(".")[2] for error in errors]
    assert names == ["--host", "block-size", "seed", "spec-method"]


def test_a_number_of_tokens_in_a_mamba_block_is_a_multiple_of_8() -> None:
    assert not option_errors({"mamba-block-size": "16"})
    assert "a multiple of 8" in str(option_errors({"mamba-block-size": "12"})[0])


def test_a_value_that_only_the_newest_vllm_has_needs_its_profile() -> None:
    options = {"moe-backend": "aiter_mega_moe", "seed": "1"}
    (error,) = newer_value_errors(options, "0.31.0")
    assert error.path == "spec.engine.options.moe-backend"
    assert "only vLLM 0.32.0" in error.message
    assert newer_value_errors(options, "0.32.0") == []
    assert newer_value_errors(options, "0.100.1") == []
    assert newer_value_errors({"moe-backend": "auto"}, "0.31.0") == []


CHUNKED = "--no-enable-chunked-prefill"


@pytest.mark.parametrize(
    ("arguments", "count"),
    [((CHUNKED,), 1), (("--enable_chunked_prefill=false",), 1), (("--enable-chunked-prefill",), 0), ((), 0)],
)  # fmt: skip
def test_the_arguments_of_a_profile_count_for_the_rules_between_options(
    arguments: tuple[str, ...], count: int
) -> None:
    spec = InferenceServiceSpec.model_validate(
        {"model": {"source": "pvc://m/x"}, "engine": {"maxModelLength": 32768}}
    )
    profile = default_catalog().resolve("cuda")
    profile = profile.model_copy(update={"extra_arguments": arguments})
    assert len(profile_errors(spec, profile)) == count


def test_an_option_that_needs_another_says_so() -> None:
    (error,) = option_errors({"spec-method": "ngram"})
    assert "spec-tokens" in error.message
    assert not option_errors({"spec-method": "ngram", "spec-tokens": "3"})
    assert not option_errors({"enable-auto-tool-choice": "false"})


def test_no_option_is_refused_by_the_engines_own_fence() -> None:
    """The engine refuses prefixes of reserved names; an option that the operator allows must pass."""
    for name, value in good_pairs():
        engine = Engine.model_validate({"options": {name: value}})
        assert engine.options == {name: value}
        assert re.fullmatch(r"[a-z][a-z0-9-]{1,62}", name)
        assert re.fullmatch(r"[A-Za-z0-9._/:@][A-Za-z0-9._/:@-]{0,252}", value)


@pytest.mark.promise("no-data-parallel")
@given(name=st.text(max_size=80))
def test_no_other_name_passes(name: str) -> None:
    assume(name not in ALLOWED)
    for value in ("true", "1", "auto"):
        assert option_errors({name: value})


@pytest.mark.promise("engine-options")
@given(name=NAMES, cut=st.integers(1, 40))
def test_no_abbreviation_passes(name: str, cut: int) -> None:
    short = name[:-cut] if cut < len(name) else name[:1]
    assume(short not in ALLOWED)
    assert option_errors({short: "true"})
    assert option_errors({short: "1"})


@given(
    name=NAMES,
    change=st.sampled_from(
        [
            lambda n: n.replace("-", "_"),
            lambda n: f"--{n}",
            lambda n: f"-{n}",
            lambda n: f"no-{n}",
            lambda n: f" {n}",
            lambda n: f"{n} ",
            lambda n: f"{n}\n",
            lambda n: f"{n}\x00",
            lambda n: n.upper(),
            lambda n: f"{n}.backend",
            lambda n: f"{n}=1",
            lambda n: f"{n}+",
            lambda n: n.replace("-", "‐"),
        ]
    ),
)
def test_no_variant_of_an_allowed_name_passes(name: str, change: object) -> None:
    variant = change(name)  # type: ignore[operator]
    assume(variant not in ALLOWED)
    assert all(option_errors({variant: value}) for value in ("true", "1", "auto"))


@given(
    name=NAMES,
    value=st.one_of(
        st.text(max_size=300),
        st.text(alphabet=string.printable, max_size=20),
        st.sampled_from(
            [
                "",
                " ",
                "-1",
                "--host=0.0.0.0",
                "1 --trust-remote-code",
                "1\n--middleware=x",
                '{"a":1}',
                "true\n",
                "True",
                "TRUE",
                "yes",
                "0x10",
                "1e3",
                "１",
                "+1",
                "01",
                "1_000",
                "nan",
                "inf",
                "../../etc/passwd",
            ]
        ),
    ),
)
def test_what_passes_is_one_word_of_the_options_kind(name: str, value: str) -> None:
    try:
        word = argument(name, value)
    except ValueError:
        assert option_errors({name: value})
        assert value not in ALLOWED[name].takes.examples()
        return
    assert word in {f"--{name}", f"--no-{name}", f"--{name}={value}"}
    assert not any(char.isspace() or char in "{}\"'`$;&|\\" for char in word)
    assert not value.startswith("-")
    assert word.isascii()
