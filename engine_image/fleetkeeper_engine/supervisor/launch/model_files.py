"""Sizes of a model from its own files: config.json and the headers of its weights.

Reads a few kilobytes, loads no tensor, and imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.spec import DType
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError

DTYPE_BYTES = {DType.FLOAT32: 4, DType.FLOAT16: 2, DType.BFLOAT16: 2}
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100 * 1024**2
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has kernels for. An adapter's rank is rounded up to one of them."""
DEFAULT_LENGTH = 2048
"""Tokens: vLLM's own value for a model that specifies no length."""
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a model."""

    parameters: int
    """Number of floating-point weights."""
    other_bytes: int
    """Bytes of weights that are not floating point and keep their size."""
    dtype: DType
    """The number format in which it was saved."""
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_values_per_token: int
    """Numbers kept in the KV cache for one token: all layers, keys and values."""
    max_length: int
    """The most tokens of a sequence that the config allows."""
    adapter_ranks: tuple[int, ...] = ()
    """The rank of each LoRA adapter that is loaded at start."""

    @property
    def largest_adapter_rank(self) -> int:
        """Return the rank that --max-lora-rank must allow; 0 without adapters."""
        return max(self.adapter_ranks, default=0)

    def adapters_bytes(self, dtype: DType) -> int:
        """Return an upper bound of the adapters' memory, over all ranks. Each takes two places.

        vLLM keeps every adapter in main memory and in a slot of full size. For each linear layer of
        `in` and `out` values this is rank x (in + out) numbers, with the rank rounded up to a
        kernel's. A decoder layer of width h with an MLP of i has at most rank x (12 h + 3 i) of
        them, the output rank x (h + vocabulary).
        """
        if not self.adapter_ranks:
            return 0
        rank = lora_rank(self.largest_adapter_rank)
        layer = 12 * self.hidden + 3 * self.intermediate
        slot = rank * (self.layers * layer + self.hidden + self.vocabulary)
        return 2 * len(self.adapter_ranks) * slot * DTYPE_BYTES[dtype]

    def weights_bytes(self, dtype: DType, *, quantized: bool = False) -> int:
        """Return the memory of the weights loaded as `dtype`; quantized weights keep their stored size."""
        size = 1 if quantized else DTYPE_BYTES[dtype]
        return self.parameters * size + self.other_bytes

    def kv_bytes_per_token(self, dtype: DType) -> int:
        """Return the KV cache of one token, over all ranks."""
        return self.kv_values_per_token * DTYPE_BYTES[dtype]


def read_facts(directory: Path, adapters: Iterable[Path] = ()) -> ModelFacts:
    """Return the sizes of the model in `directory`.

    Raises:
        StartRefusedError: ModelNotFound or ModelNotReadable, with the path and what to do.
    """
    config = _read_json(_existing(directory, "config.json"))
    text = config.get("text_config")
    shape: Mapping[str, Any] = text if isinstance(text, Mapping) else config
    parameters, other = _weights(directory)
    try:
        return ModelFacts(
            parameters=parameters,
            other_bytes=other,
            dtype=_dtype(shape, config),
            layers=_number(shape, "num_hidden_layers", 1),
            hidden=_number(shape, "hidden_size", 1),
            intermediate=_number(shape, "intermediate_size", 4 * _number(shape, "hidden_size", 1)),
            vocabulary=_number(shape, "vocab_size", 1),
            kv_values_per_token=_kv_values_per_token(shape),
            max_length=_max_length(shape, directory / "tokenizer_config.json"),
            adapter_ranks=tuple(_adapter_rank(path) for path in adapters),
        )
    except (TypeError, ValueError) as error:
        raise StartRefusedError(
            DeathClass.MODEL_NOT_READABLE,
            f"{directory / 'config.json'} has a field that is not a number: {error}",
        ) from error


def lora_rank(largest: int) -> int:
    """Return the value of --max-lora-rank for adapters up to a rank."""
    return next((rank for rank in LORA_RANKS if rank >= largest), LORA_RANKS[-1])


def _existing(directory: Path, name: str) -> Path:
    path = directory / name
    try:
        if not directory.is_dir():
            raise StartRefusedError(
                DeathClass.MODEL_NOT_FOUND,
                f"directory {directory} does not exist; check the volume mount and model.source",
            )
        if not path.exists():
            raise StartRefusedError(
                DeathClass.MODEL_NOT_FOUND,
                f"{directory} has no {name}; set model.source to the directory that contains it",
            )
    except PermissionError as error:
        raise _unreadable(directory, error) from error
    return path


def _unreadable(path: Path, error: Exception) -> StartRefusedError:
    return StartRefusedError(
        DeathClass.MODEL_NOT_READABLE,
        f"{path} cannot be read ({error}); the pod's user needs read permission for every file of the model",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(value, dict):
        raise _unreadable(path, ValueError("not a JSON object"))
    return value


def _number(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name)
    return default if value is None else int(value)


def _max_length(shape: Mapping[str, Any], tokenizer: Path) -> int:
    """Return the longest sequence in tokens: model_max_length, else the lowest of the config, else 2048.

    vLLM uses the same value, except that it is longer for models with a stretched rotary embedding.
    The tokenizer's length matters only for models with absolute positions (for embeddings).
    """
    lengths = [int(shape[key]) for key in _LENGTH_KEYS if shape.get(key) is not None]
    if shape.get("model_max_length"):
        lengths = [int(shape["model_max_length"])]
    if shape.get("position_embedding_type") == "absolute" and tokenizer.exists():
        length = _read_json(tokenizer).get("model_max_length")
        if isinstance(length, int | float) and 0 < length < math.inf:
            lengths.append(int(length))  # 1e30 means no limit
    return min(lengths, default=DEFAULT_LENGTH)


def _dtype(shape: Mapping[str, Any], config: Mapping[str, Any]) -> DType:
    for source in (shape, config):
        named = source.get("dtype") or source.get("torch_dtype")
        if named in set(DType):
            return DType(named)
    return DType.FLOAT32


def _kv_values_per_token(shape: Mapping[str, Any]) -> int:
    """Return an upper bound: every layer keeps keys and values of every token (true without sliding windows)."""
    layers = _number(shape, "num_hidden_layers", 1)
    latent = _number(shape, "kv_lora_rank", 0)
    if latent:
        # Multi-head latent attention keeps one compressed vector and the rotary part instead of
        # keys and values.
        return layers * (latent + _number(shape, "qk_rope_head_dim", 0))
    heads = _number(shape, "num_attention_heads", 1)
    kv_heads = _number(shape, "num_key_value_heads", heads)
    width = _number(shape, "head_dim", _number(shape, "hidden_size", 1) // max(1, heads))
    return 2 * layers * kv_heads * width


def _weights(directory: Path) -> tuple[int, int]:
    """Return the floating-point parameters, and the bytes of everything else, over all weight files."""
    files = sorted(directory.glob("*.safetensors"))
    # Some repositories contain the same weights twice; vLLM then loads model*.safetensors.
    sharded = [file for file in files if file.name.startswith("model")]
    parameters = other = 0
    for file in sharded or files:
        found, rest = _weights_of(file)
        parameters += found
        other += rest
    if files:
        return parameters, other
    pickled = sorted(directory.glob("*.bin")) + sorted(directory.glob("*.pt"))
    if not pickled:
        raise StartRefusedError(
            DeathClass.MODEL_NOT_FOUND,
            f"{directory} has a config.json but no weights (*.safetensors); check that the download finished",
        )
    return 0, sum(file.stat().st_size for file in pickled)


def largest_tensor_bytes(directory: Path) -> int:
    """Return the stored size of the largest tensor in the weight files; 0 without any.

    Raises:
        StartRefusedError: ModelNotReadable, with the path and what to do.
    """
    return max((_largest_of(file) for file in directory.glob("*.safetensors")), default=0)


def _largest_of(file: Path) -> int:
    try:
        tensors = [item for name, item in _header_of(file)[1].items() if name != "__metadata__"]
        return max(
            (item["data_offsets"][1] - item["data_offsets"][0] for item in tensors), default=0
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise _unreadable(file, error) from error


def _header_of(file: Path) -> tuple[int, dict[str, Any]]:
    """Return the length of a safetensors header, and the header."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return length, json.loads(stream.read(min(length, _MAX_HEADER_BYTES)))


def _weights_of(file: Path) -> tuple[int, int]:
    try:
        length, header = _header_of(file)
        parameters, other, data = _sum_header(header)
        size = file.stat().st_size
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise _unreadable(file, error) from error
    if size < 8 + length + data:
        truncated = ValueError(f"it ends after {size} of {8 + length + data} bytes")
        raise _unreadable(file, truncated)
    return parameters, other


def _sum_header(header: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return floating-point parameters, other bytes, and bytes of data of one safetensors header."""
    parameters = other = data = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        start, stop = (int(offset) for offset in tensor["data_offsets"])
        data = max(data, stop)
        size = _FLOATS.get(tensor["dtype"])
        if size:
            parameters += (stop - start) // size
        else:
            other += stop - start
    return parameters, other, data


def _adapter_rank(directory: Path) -> int:
    return _number(_read_json(_existing(directory, "adapter_config.json")), "r", LORA_RANKS[0])
