"""The tokenizer of a simulated engine, its texts, and stop texts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_engine.simulated.processor import StopSearch
from fleetkeeper_engine.simulated.tokens import (
    TEXTS,
    TOKENS,
    Text,
    decode,
    encode,
    is_token,
    token_text,
)

ENGLISH = (
    "The scheduler gives the tokens of a step first to the sequences that decode, then to prefills in "
    "the order of their start, and then to waiting requests while sequences and blocks are left."
)


@given(st.text())
def test_any_text_is_decoded_to_itself(text: str) -> None:
    tokens = encode(text)
    assert decode(tokens) == text
    assert all(is_token(token) and token < 2**31 for token in tokens)


def test_half_of_a_pair_becomes_the_replacement_character() -> None:
    assert decode(encode("a\ud800b")) == "a\ufffdb"


def test_english_has_about_four_characters_in_a_token() -> None:
    assert 3.5 <= len(ENGLISH) / len(encode(ENGLISH)) <= 5.0


@given(st.integers(2**18, 2**32))
def test_an_id_outside_the_vocabulary_is_no_token(token: int) -> None:
    """Unless `encode` gives it for its text."""
    assert is_token(token) == (encode(token_text(token)) == [token])


@given(st.integers(0, 2**18 - 1))
def test_a_token_of_another_tokenizer_has_a_text(token: int) -> None:
    assert is_token(token)
    assert token_text(token)


def test_an_answer_has_as_many_tokens_as_its_text() -> None:
    indices = Text(3, [1, 2, 3]).take(500)
    text = "".join(TEXTS[index] for index in indices)
    assert encode(text) == [TOKENS[index] for index in indices]


@given(
    st.integers(),
    st.lists(st.integers(0, 2**50), max_size=200),
    st.lists(st.integers(0, 20), max_size=20),
)
def test_an_answer_does_not_depend_on_the_steps(
    seed: int, prompt: list[int], steps: list[int]
) -> None:
    stepped, whole = Text(seed, prompt), Text(seed, prompt)
    assert stepped.natural_length == whole.natural_length >= 16
    found = [index for count in steps for index in stepped.take(count)]
    assert found == whole.take(sum(steps))


def test_seed_prompt_and_choice_make_other_answers() -> None:
    kinds = [Text(0, [1, 2]), Text(1, [1, 2]), Text(0, [1, 3]), Text(0, [1, 2], 1)]
    assert len({tuple(kind.take(20)) for kind in kinds}) == 4


@given(
    st.text("ab ", max_size=60),
    st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 5),
    st.booleans(),
)
def test_a_stop_text_is_found_however_the_text_comes(
    text: str, stops: list[str], size: int, keeps: bool
) -> None:
    """What was sent is what stands before the stop text that is complete first."""
    search = StopSearch(tuple(stops), keeps=keeps)
    sent, found = "", None
    for at in range(0, len(text), size):
        part, found = search.add(text[at : at + size])
        sent += part
        if found is not None:
            break
    if found is None:
        assert not any(stop in text for stop in stops)
        assert sent + search.rest() == text
    else:
        assert text.startswith(sent)
        assert found in stops
        place = len(sent) - len(found) * keeps
        assert text[place:].startswith(found)
        assert not any(stop in text[:place] for stop in stops)
