"""Forms, however their bytes are cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.batch.api.multipart import MAX_HEAD_BYTES, MAX_PARTS, Form
from fleetkeeper_gateway.http.errors import Refusal
from tests.support.batch_api import BOUNDARY, form

CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"


class Pieces:
    """A body in pieces, and the most of it that a reader held."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._left = list(reversed(pieces))

    async def read(self) -> bytes:
        return self._left.pop() if self._left else b""


async def read_all(
    body: Sequence[bytes], content_type: str = CONTENT_TYPE
) -> list[tuple[str, str | None, bytes]]:
    reader = Form(content_type, Pieces(body).read)
    found = []
    while (part := await reader.next_part()) is not None:
        data = b"".join([piece async for piece in reader.data()])
        found.append((part.name, part.filename, data))
    return found


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Return data in pieces of these sizes, repeated to its end."""
    pieces, start, number = [], 0, 0
    while start < len(data):
        size = sizes[number % len(sizes)]
        pieces.append(data[start : start + size])
        start, number = start + size, number + 1
    return pieces


names = st.text("abcdefghijklmnop[]_", min_size=1, max_size=20)
contents = st.binary(max_size=300) | st.lists(
    st.sampled_from([b"\r\n", b"--", BOUNDARY.encode()[:-1], b"-", b"\r", b"\n", b"x"]), max_size=30
).map(b"".join)
fields = st.lists(st.tuples(names, st.none() | names, contents), min_size=1, max_size=5)


@given(fields, st.lists(st.integers(1, 40), min_size=1, max_size=8))
async def test_every_field_is_read_as_it_was_sent(
    sent: list[tuple[str, str | None, bytes]], sizes: list[int]
) -> None:
    assert await read_all(cut(form(*sent), sizes)) == sent


@given(fields, st.data())
async def test_a_form_that_ends_early_is_refused(
    sent: list[tuple[str, str | None, bytes]], data: st.DataObject
) -> None:
    whole = form(*sent)
    # The last line break may be missing.
    end = data.draw(st.integers(0, len(whole) - 3))
    with pytest.raises(Refusal, match=r"before its last boundary|begin with its boundary"):
        await read_all([whole[:end]] if end else [])


async def test_pieces_of_a_large_file_are_passed_on_as_they_arrive() -> None:
    whole = form(("file", "f", b"x" * 1_000_000))
    reader = Form(CONTENT_TYPE, Pieces(cut(whole, [1000])).read)
    assert await reader.next_part() is not None
    sizes = [len(piece) async for piece in reader.data()]
    assert sum(sizes) == 1_000_000
    assert max(sizes) <= 2000


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ('multipart/form-data; boundary="a b"', "a b"),
        ("Multipart/Form-Data; charset=utf-8; BOUNDARY=ab", "ab"),
    ],
)
async def test_the_boundary_is_read_as_clients_write_it(content_type: str, boundary: str) -> None:
    body = form(("purpose", None, b"batch"), boundary=boundary)
    assert await read_all([body], content_type) == [("purpose", None, b"batch")]


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 300],
)
async def test_what_is_no_form_is_refused(content_type: str) -> None:
    with pytest.raises(Refusal) as refused:
        Form(content_type, Pieces([]).read)
    assert (refused.value.status, refused.value.code) == (400, "invalid_form")


@pytest.mark.promise("batch-bounds")
@pytest.mark.parametrize(
    "body",
    [
        b"something else",
        f"--{BOUNDARY}x\r\n\r\n\r\n--{BOUNDARY}--".encode(),
        f"--{BOUNDARY}\r\nContent-Type: text/plain\r\n\r\nx\r\n--{BOUNDARY}--".encode(),
        f"--{BOUNDARY}\r\nContent-Disposition: form-data\r\n\r\nx\r\n--{BOUNDARY}--".encode(),
        f"--{BOUNDARY}\r\nX: ".encode() + b"x" * MAX_HEAD_BYTES,
        form(*[("a", None, b"")] * (MAX_PARTS + 1)),
        form(("a", None, b"")) + b"x" * 100_000,
    ],
    ids=["text", "boundary", "no disposition", "no name", "head", "parts", "epilogue"],
)
async def test_malformed_forms_are_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        await read_all(cut(body, [5000]))
    assert refused.value.code == "invalid_form"


async def test_names_are_read_as_clients_escape_them() -> None:
    head = (
        f"--{BOUNDARY}\r\ncontent-disposition: form-data; name=file; "
        'filename="a \\"quoted\\" ; name=x é.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    ).encode()
    body = head + f"data\r\n--{BOUNDARY}--\r\n".encode()
    assert await read_all([body]) == [("file", 'a "quoted" ; name=x é.jsonl', b"data")]
