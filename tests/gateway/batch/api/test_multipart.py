"""Forms, however their bytes are cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.batch.api.upload import MAX_PARTS, UploadedFile
from fleetkeeper_gateway.http.errors import Refusal
from tests.support.batch.batch_api import BOUNDARY, form

CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"
PURPOSE = ("purpose", None, b"batch")


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Return data in pieces of these sizes, repeated to its end."""
    pieces, start, number = [], 0, 0
    while start < len(data):
        size = sizes[number % len(sizes)]
        pieces.append(data[start : start + size])
        start, number = start + size, number + 1
    return pieces


async def read(
    pieces: Sequence[bytes], content_type: str = CONTENT_TYPE
) -> tuple[str, list[bytes]]:
    """Return the name of a file, and its bytes in the parts in which they are passed on."""
    left = iter([*pieces, b""])

    async def receive() -> bytes:
        return next(left)

    upload = UploadedFile(content_type, receive, 10_000_000)
    parts = [part async for part in upload.parts()]
    return upload.filename, parts


contents = st.binary(min_size=1, max_size=300) | st.lists(
    st.sampled_from([b"\r\n", b"--", BOUNDARY.encode()[:-1], b"-", b"\r", b"\n", b"x"]),
    min_size=1,
    max_size=30,
).map(b"".join)
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(contents, st.permutations(["file", "purpose", "unknown"]), sizes)
async def test_a_file_is_read_as_it_was_sent(
    data: bytes, order: list[str], sizes: list[int]
) -> None:
    fields = {"file": ("file", "f", data), "purpose": PURPOSE, "unknown": ("x[y]", None, b"\r\n-")}
    _, parts = await read(cut(form(*(fields[name] for name in order)), sizes))
    assert b"".join(parts) == data


@given(contents, sizes, st.data())
async def test_a_form_that_ends_early_is_refused(
    content: bytes, sizes: list[int], data: st.DataObject
) -> None:
    whole = form(("file", "f", content), PURPOSE)
    # The last line break may be missing.
    end = data.draw(st.integers(0, len(whole) - 3))
    with pytest.raises(Refusal, match="cannot be read"):
        await read(cut(whole[:end], sizes))


async def test_pieces_of_a_large_file_are_passed_on_as_they_arrive() -> None:
    whole = form(PURPOSE, ("file", "f", b"x" * 1_000_000))
    _, parts = await read(cut(whole, [1000]))
    assert sum(map(len, parts)) == 1_000_000
    assert max(map(len, parts)) <= 2000


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ('multipart/form-data; boundary="a b"', "a b"),
        ("Multipart/Form-Data; charset=utf-8; BOUNDARY=ab", "ab"),
    ],
)
async def test_heads_are_read_as_clients_write_them(content_type: str, boundary: str) -> None:
    body = form(PURPOSE, ("file", "é 'x' ; name=x.jsonl", b"x"), boundary=boundary)
    body = body.replace(b"'", b'\\"')
    assert await read([body], content_type) == ('é "x" ; name=x.jsonl', [b"x"])


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 300],
)
async def test_what_is_no_form_is_refused(content_type: str) -> None:
    with pytest.raises(Refusal) as refused:
        await read([], content_type)
    assert (refused.value.status, refused.value.code) == (400, "invalid_form")


FILE = f'\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nx\r\n--{BOUNDARY}'.encode()


@pytest.mark.promise("batch-bounds")
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"something else", id="text"),
        pytest.param(b"x" * 100_000 + form(PURPOSE, ("file", "f", b"x")), id="preamble"),
        pytest.param(b"--the-boundaryx" + FILE + b"--", id="boundary"),
        pytest.param(b"--the-boundary" + FILE + b"x", id="second boundary"),
        pytest.param(b"--the-boundary\r\nContent-Type: a/b\r\n\r\nx\r\n", id="no disposition"),
        pytest.param(b"--the-boundary\r\nX: " + b"x" * 8192, id="long header"),
        pytest.param(b"--the-boundary\r\n" + b"X: x\r\n" * 100, id="many headers"),
        pytest.param(form(("purpose", None, b"x" * 2000)), id="long field"),
        pytest.param(form(("purpose", None, b"\xff")), id="not UTF-8"),
        pytest.param(form(*((f"{n}", None, b"") for n in range(MAX_PARTS + 1))), id="parts"),
        pytest.param(form(PURPOSE, ("file", "f", b"x")) + b"x" * 100_000, id="epilogue"),
    ],
)
async def test_malformed_forms_are_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        await read(cut(body, [5000]))
    assert refused.value.code == "invalid_form"
