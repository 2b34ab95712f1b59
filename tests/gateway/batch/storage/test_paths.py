"""No ID leads out of its key, and no path out of the store."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_gateway.batch.storage import Storage, paths
from tests.support.batch.batch_storage import (
    KEY,
    a_batch,
    a_file,
    batch_id,
    file_id,
    files_in,
    parts_of,
)

TRICKS = (
    "",
    ".",
    "..",
    "../file-" + "0" * 32,
    "file-" + "0" * 32 + "/../x",
    "file-" + "0" * 32 + "\n",
    "file-" + "0" * 31 + "A",
    "file-" + "0" * 31 + "٣",
    "file-%2e%2e%2f" + "0" * 22,
    "/etc/passwd",
    "a\\b",
    "a\x00b",
    "batch_" + "0" * 33,
    ".hidden",
    "a/b",
)


@pytest.mark.parametrize("trick", TRICKS)
async def test_what_is_no_id_is_neither_found_nor_written(
    local: Storage, directory: Path, trick: str
) -> None:
    before = files_in(directory)
    assert await local.files.get(KEY, trick) is None
    assert not await local.files.delete(KEY, trick)
    assert await local.batches.get(KEY, trick) is None
    with pytest.raises(ValueError, match="is no file ID"):
        local.files.data_path(KEY, trick)
    with pytest.raises(ValueError, match="is no file ID"):
        await local.files.put(a_file(id=trick))
    with pytest.raises(ValueError, match="is no batch ID"):
        await local.batches.create(a_batch(id=trick))
    if not paths.is_key_id(trick):
        with pytest.raises(ValueError, match="is no key ID"):
            await local.files.put(a_file(key_id=trick))
        with pytest.raises(ValueError, match="is no key ID"):
            await local.batches.create(a_batch(key_id=trick))
    assert files_in(directory) == before


@pytest.mark.parametrize("trick", ["../x", "a/../../x", "/x", "a//b", "", "a/.b", "a/b\n", "a#1"])
async def test_objects_refuse_paths_that_lead_elsewhere(storage: Storage, trick: str) -> None:
    objects = storage.objects
    for call in (
        objects.create(trick, b""),
        objects.write(trick, parts_of(b"x")),
        objects.read(trick),
        objects.read_range(trick, 0, 1),
        anext(objects.stream(trick)),
        objects.delete([trick]),
        objects.list(f"{trick}/"),
    ):
        with pytest.raises(ValueError, match="no path"):
            await call


@pytest.mark.promise("batch-paths")
@given(key=st.text(max_size=40), name=st.text(max_size=60))
def test_a_path_stays_below_its_key(key: str, name: str) -> None:
    """Whatever the texts are: it is refused, or a path of four parts below the key."""
    for own in (key, KEY):
        for id_, make in (
            (name, paths.file_object),
            (f"file-{name}", paths.file_object),
            (batch_id(1), paths.file_object),
            (f"batch_{name}", paths.batch_object),
            (file_id(1), paths.batch_object),
        ):
            try:
                path = make(own, id_, paths.DATA)
            except paths.BadPart:
                continue
            assert path.split("/")[1] == own
            assert path.count("/") == 4
            assert ".." not in path.split("/")


def test_markers_and_parts_of_logs_are_checked() -> None:
    assert paths.parse_marker(paths.marker(KEY, batch_id(3))) == (KEY, batch_id(3))
    for other in ("active/x", f"active/{KEY}/x", f"keys/{KEY}/{batch_id(1)}", "active/a/b/c"):
        assert paths.parse_marker(other) is None
    for chunk, number in ((100_000, 0), (0, 10_000), (-1, 0)):
        with pytest.raises(paths.BadPart):
            paths.log_part(KEY, batch_id(1), chunk, number)
