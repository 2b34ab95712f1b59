"""The entries of a key's Secret: what is read, what is refused, and what an error may say."""

from __future__ import annotations

import base64
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_contract import rfc3339
from fleetkeeper_contract.client_key_entries import (
    MAX_LIMIT,
    BadEntry,
    ClientKey,
    decoded_entries,
    digest_of,
    entries_of,
    format_limit,
    is_key,
    new_key,
    parse_entries,
    parse_limit,
    parse_time,
)
from fleetkeeper_contract.tiers import TIER_LABELS
from tests.support.gateway.client_keys import key_entries, key_of

KEY = key_of(1)
TEXTS = st.text(max_size=80)
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
GLOBS = st.from_regex(r"[A-Za-z0-9._:/*?-]{1,30}", fullmatch=True)
LIMITS = st.dictionaries(st.sampled_from(TIER_LABELS), st.integers(1, MAX_LIMIT)).map(
    lambda found: tuple((tier, found[tier]) for tier in TIER_LABELS if tier in found)
)
MOMENTS = st.none() | st.integers(0, 10**11).map(float)


@st.composite
def client_keys(draw: st.DrawFn) -> ClientKey:
    digests = draw(
        st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=2, unique=True)
    )
    return ClientKey(
        name=draw(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)),
        digests=tuple(one.hex() for one in digests),
        namespaces=tuple(draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))),
        models=tuple(draw(st.lists(GLOBS, min_size=1, max_size=4, unique=True))),
        highest_tier=draw(st.sampled_from(TIER_LABELS)),
        expires=draw(MOMENTS),
        old_until=draw(MOMENTS) if len(digests) == 2 else None,
        requests_per_minute=draw(LIMITS),
        tokens_per_minute=draw(LIMITS),
        concurrency=draw(LIMITS),
    )


def _read(entries: dict[str, str]) -> ClientKey:
    return parse_entries(entries, default_name="chat")


def test_absent_entries_have_their_defaults() -> None:
    assert _read(key_entries(KEY)) == ClientKey(
        name="chat", digests=(digest_of(KEY),), namespaces=("team-a",)
    )


def test_space_and_line_ends_around_values_do_not_matter() -> None:
    found = _read(
        {
            "sha256": f" {digest_of(KEY).upper()} , {digest_of(key_of(2))}\n",
            "namespaces": "team-a , team-b\n",
            "models": " llama-*, chat ",
            "concurrency": "realtime = 2 , batch=8\n",
        }
    )
    assert found.digests == (digest_of(KEY), digest_of(key_of(2)))
    assert found.namespaces == ("team-a", "team-b")
    assert found.models == ("llama-*", "chat")
    assert found.concurrency == (("realtime", 2), ("batch", 8))


@given(client_keys())
def test_what_is_written_is_read_again(key: ClientKey) -> None:
    assert parse_entries(entries_of(key), default_name="other") == key


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("sha256", ""),
        ("sha256", KEY),
        ("sha256", digest_of(KEY)[:-1]),
        ("sha256", f"{digest_of(KEY)},{digest_of(KEY)}"),
        ("sha256", ",".join(digest_of(key_of(number)) for number in range(3))),
        ("namespaces", ""),
        ("namespaces", "*"),
        ("namespaces", "team-a,"),
        ("namespaces", "team-*"),
        ("namespaces", "Team"),
        ("models", ""),
        ("models", "a b"),
        ("models", "a,,b"),
        ("highestTier", "Realtime"),
        ("highestTier", "urgent"),
        ("expires", "2030-01-01"),
        ("expires", "2030-01-01T00:00:00"),
        ("expires", "2030-02-30T00:00:00Z"),
        ("expires", "9999-12-31T23:59:59-10:00"),
        ("expires", "never"),
        ("oldUntil", "2030-01-01T00:00:00Z"),
        ("requestsPerMinute", "0"),
        ("requestsPerMinute", "-1"),
        ("requestsPerMinute", "1.5"),
        ("tokensPerMinute", "fast=1"),
        ("tokensPerMinute", "batch=1,batch=2"),
        ("concurrency", "batch="),
        ("concurrency", str(MAX_LIMIT + 1)),
        ("name", "two\nlines"),
        ("expire", "2030-01-01T00:00:00Z"),
    ],
)
def test_a_bad_entry_is_named_and_its_value_is_not_shown(entry: str, value: str) -> None:
    with pytest.raises(BadEntry) as refused:
        _read({**key_entries(KEY), entry: value})
    assert re.search(rf"\b{entry}\b", str(refused.value))
    assert KEY not in str(refused.value)
    assert digest_of(KEY)[:10] not in str(refused.value)


@given(st.dictionaries(st.sampled_from(sorted(entries_of(_read(key_entries(KEY))))), TEXTS))
def test_any_text_is_read_or_refused(entries: dict[str, str]) -> None:
    try:
        found = _read({**key_entries(KEY), **entries})
    except BadEntry:
        return
    assert _read(entries_of(found)) == found


@pytest.mark.promise("key-malformed")
@given(
    st.none()
    | TEXTS
    | st.dictionaries(
        TEXTS,
        st.none()
        | st.integers()
        | TEXTS
        | st.binary().map(lambda value: base64.b64encode(value).decode()),
    )
)
def test_any_data_is_decoded_or_refused(data: object) -> None:
    try:
        found = decoded_entries(data)
    except BadEntry:
        return
    assert isinstance(data, dict)
    assert found.keys() == data.keys()


def test_a_limit_without_a_tier_holds_for_each_tier() -> None:
    assert parse_limit("limit", "100") == tuple((tier, 100) for tier in TIER_LABELS)
    assert format_limit(parse_limit("limit", "100")) == "100"


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "5 ", str(MAX_LIMIT + 1), "9" * 20, "many"])
def test_a_limit_that_is_no_possible_number_is_told_which_numbers_are(text: str) -> None:
    with pytest.raises(BadEntry, match=f"limit must be a number from 1 to {MAX_LIMIT}"):
        parse_limit("limit", text)


@pytest.mark.parametrize(
    "text", ["batch=0", f"batch={MAX_LIMIT + 1}", f"batch={'9' * 20}", "batch="]
)
def test_a_limit_of_a_tier_is_held_to_the_same_numbers(text: str) -> None:
    with pytest.raises(BadEntry, match=f"limit must be a number from 1 to {MAX_LIMIT}"):
        parse_limit("limit", text)


@pytest.mark.parametrize("text", ["fast=1", "batch=1,5", "=1"])
def test_a_limit_of_no_tier_is_told_which_tiers_there_are(text: str) -> None:
    with pytest.raises(BadEntry, match="limit names no tier; the tiers are realtime"):
        parse_limit("limit", text)


def test_a_time_may_have_a_fraction_and_an_offset() -> None:
    assert parse_time("expires", "2030-01-01T02:00:00.5+02:00") == 1893456000.5
    assert rfc3339.format(1893456000.5) == "2030-01-01T00:00:00Z"


@pytest.mark.promise("key-digests")
@given(st.binary(min_size=32, max_size=32))
def test_every_new_key_has_the_form_of_a_key(random: bytes) -> None:
    assert is_key(new_key(random))


@pytest.mark.promise("key-digests")
@pytest.mark.parametrize(
    "text",
    ["", "fk_", "password", KEY[:-1], f"{KEY}A", f" {KEY}", KEY.replace("fk_", "sk-"), f"{KEY}\n"],
)
def test_what_has_another_form_is_no_key(text: str) -> None:
    assert not is_key(text)


def test_a_key_needs_all_its_random_bytes() -> None:
    with pytest.raises(ValueError, match="32 random bytes"):
        new_key(b"short")
