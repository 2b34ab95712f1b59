"""Streaming from object storage: what an image needs, and the memory of the buffers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError
from fleetkeeper_engine.supervisor.launch.fetch_objects import fetch
from fleetkeeper_engine.supervisor.launch.model_files import largest_tensor_bytes, read_facts
from fleetkeeper_engine.supervisor.launch.object_storage import (
    BUFFER_BYTES,
    desired_buffer_bytes,
    require_streamer,
)

GIB = 1024**3


def test_an_image_without_the_streamer_says_what_is_missing_and_what_to_do() -> None:
    with pytest.raises(StartRefusedError) as refused:
        require_streamer(lambda name: None if name == "runai_model_streamer_s3" else object())
    assert refused.value.death is DeathClass.BAD_ENGINE_OPTION
    assert "lacks runai_model_streamer_s3," in str(refused.value)
    assert "profile" in str(refused.value)
    require_streamer(lambda _: object())


@given(largest=st.integers(0, 8 * GIB), room=st.integers(-GIB, 512 * GIB), ranks=st.integers(1, 16))
def test_the_buffers_and_a_copy_of_a_tensor_stay_within_the_room(
    largest: int, room: int, ranks: int
) -> None:
    if room < 2 * ranks * largest or room < 0:
        with pytest.raises(StartRefusedError) as refused:
            desired_buffer_bytes(largest_bytes=largest, room_bytes=room, ranks=ranks)
        assert refused.value.death is DeathClass.HOST_OUT_OF_MEMORY
        return
    buffer = desired_buffer_bytes(largest_bytes=largest, room_bytes=room, ranks=ranks)
    assert largest <= buffer <= max(BUFFER_BYTES, largest)
    assert ranks * (buffer + largest) <= room


class Bucket:
    """The three calls of an S3 client that are used; counts the bytes that were read."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.read_bytes = 0

    def get_paginator(self, _: str) -> Bucket:
        return self

    def paginate(self, **asked: str) -> list[dict[str, object]]:
        inside = {
            key: body
            for key, body in self.objects.items()
            if key.startswith(asked["Prefix"])
            and asked["Delimiter"] not in key.removeprefix(asked["Prefix"]).rstrip("/")
        }
        return [{}, {"Contents": [{"Key": k, "Size": len(b)} for k, b in inside.items()]}]

    def download_file(self, _: str, key: str, target: str) -> None:
        self.read_bytes += len(self.objects[key])
        Path(target).write_bytes(self.objects[key])

    def get_object(self, **asked: str) -> dict[str, Body]:
        first, last = map(int, asked["Range"].removeprefix("bytes=").split("-"))
        part = self.objects[asked["Key"]][first : last + 1]
        self.read_bytes += len(part)
        return {"Body": Body(part)}


class Body:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def read(self) -> bytes:
        return self.content


def safetensors(sizes: list[int]) -> bytes:
    header, at = {}, 0
    for number, size in enumerate(sizes):
        header[f"t{number}"] = {"dtype": "F32", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def test_only_the_headers_of_weights_are_read_and_the_plan_sees_their_sizes(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    weights = safetensors([4_000_000, 1_000_000])
    bucket = Bucket(
        {
            "llama/v1/": b"",
            "llama/v1/config.json": json.dumps(config).encode(),
            "llama/v1/tokenizer.json": b"{}",
            "llama/v1/notes.pdf": b"none of ours",
            "llama/v1/original/model.safetensors": weights,
            "llama/v1/model.safetensors": weights,
            "llama/v10/config.json": b"another version",
        }
    )
    directory = fetch(bucket, "models", "llama/v1/", tmp_path)
    assert {file.name for file in directory.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert bucket.read_bytes < 2000
    stand_in = (directory / "model.safetensors").stat()
    assert stand_in.st_size == len(weights)
    assert stand_in.st_blocks * 512 < 100_000, "without data"
    assert read_facts(directory).parameters == 1_250_000
    assert largest_tensor_bytes(directory) == 4_000_000


def test_a_second_fetch_forgets_what_the_prefix_no_longer_has(tmp_path: Path) -> None:
    first = fetch(Bucket({"a/config.json": b"{}", "a/model.safetensors": b""}), "m", "a/", tmp_path)
    assert (first / "model.safetensors").exists()
    second = fetch(Bucket({"a/config.json": b"{}"}), "m", "a/", tmp_path)
    assert second == first
    assert [file.name for file in second.iterdir()] == ["config.json"]
