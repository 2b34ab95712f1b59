"""The rules of headers, for any spelling."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.http.baggage import split_baggage
from fleetkeeper_gateway.http.client_headers import parse_headers, response_headers

NEVER_PASSED_ON = (
    "authorization",
    "cookie",
    "proxy-authorization",
    "x-api-key",
    "x-inference-tier",
    "x-fleetkeeper-internal",
    "x-vllm-priority",
    "x-forwarded-for",
    "forwarded",
    "transfer-encoding",
    "content-length",
    "host",
    "baggage",
    "te",
)
spelled = st.sampled_from(NEVER_PASSED_ON).flatmap(
    lambda name: st.lists(st.booleans(), min_size=len(name), max_size=len(name)).map(
        lambda marks: "".join(
            "_" if mark and char == "-" else char for char, mark in zip(name, marks, strict=True)
        )
    )
)
harmless = st.sampled_from(("accept", "user-agent", "traceparent", "x-fleetkeeper-prefix"))
values = st.binary(max_size=20)


@given(
    dropped=st.lists(st.tuples(spelled, values), unique_by=lambda pair: pair[0]),
    kept=st.lists(st.tuples(harmless, st.text(max_size=20)), unique_by=lambda pair: pair[0]),
)
def test_no_spelling_of_a_header_that_is_ours_reaches_a_service(
    dropped: list[tuple[str, bytes]], kept: list[tuple[str, str]]
) -> None:
    """Names are in lower case, as ASGI says."""
    raw = [(name.encode(), value) for name, value in dropped]
    raw += [(name.encode(), value.encode()) for name, value in kept]
    assert parse_headers(raw).forwarded == kept


@given(names=st.lists(harmless, unique=True), others=st.lists(st.text("abc-,; ", max_size=9)))
def test_what_connection_names_goes_no_further(names: list[str], others: list[str]) -> None:
    value = ", ".join([*others, *(name.upper() for name in names)]).encode()
    raw = [(name.encode(), b"1") for name in ("accept", "user-agent", "x-stainless-lang")]
    left = [pair for pair in raw if pair[0].decode() not in names]
    parsed = parse_headers([*raw, (b"connection", value)])
    assert [(name.encode(), text.encode()) for name, text in parsed.forwarded] == left


@given(
    names=st.lists(
        st.one_of(
            st.sampled_from(("Content-Type", "openai-model", "Retry-After", "X-Request-Id")),
            st.sampled_from(("X-Fleetkeeper-Refused", "Set-Cookie", "Connection", "openai")),
            st.from_regex(r"[A-Za-z-]{1,12}", fullmatch=True),
        )
    )
)
def test_a_service_describes_its_answer_and_nothing_else(names: list[str]) -> None:
    own = [(b"x-request-id", b"ours")]
    answered = response_headers([(name.encode(), b"theirs") for name in names], own)
    described = ("content-type", "content-length", "content-encoding", "retry-after")
    kept = [one for one in names if one.lower() in described or one.lower().startswith("openai-")]
    assert answered == [*((name.encode(), b"theirs") for name in kept), *own]


@given(
    entries=st.lists(
        st.one_of(
            st.tuples(
                st.just("kept"), st.from_regex(r"[a-z]{1,8}=[a-z0-9;=]{0,8}", fullmatch=True)
            ),
            st.tuples(st.just("grant"), st.from_regex(r"[A-Za-z0-9._-]{0,20}", fullmatch=True)),
        )
    ),
    key=st.sampled_from(("fleetkeeper-grant", "Fleetkeeper-Grant", " fleetkeeper-grant ")),
    comma=st.sampled_from((",", " , ", ",,")),
)
def test_an_entry_with_our_key_is_never_passed_on(
    entries: list[tuple[str, str]], key: str, comma: str
) -> None:
    texts = [text if kind == "kept" else f"{key}={text};property" for kind, text in entries]
    kept, grants = split_baggage([comma.join(texts)])
    assert kept == [text for kind, text in entries if kind == "kept"]
    assert grants == [text for kind, text in entries if kind == "grant"]
