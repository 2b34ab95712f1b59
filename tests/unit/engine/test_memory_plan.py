"""The memory plan: what is handed to vLLM keeps the pod within its cap, or the start is refused."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.spec import DType
from fleetkeeper_engine.supervisor.launch.errors import StartRefusedError
from fleetkeeper_engine.supervisor.launch.memory_plan import (
    CPU_STREAMER_BYTES,
    DEVICE_MIN_UTILIZATION,
    GIB,
    MIB,
    CpuNeeds,
    activations_bytes,
    desired_cpu_base_bytes,
    desired_device_reserve_bytes,
    plan_cpu,
    plan_device,
    sequence_bytes,
)
from fleetkeeper_engine.supervisor.launch.model_files import lora_rank, read_facts

SIZES = st.integers(0, 200 * GIB)


@pytest.mark.promise("neighbor-memory")
@given(
    limit=st.integers(256 * MIB, 512 * GIB),
    cap=st.integers(10, 80),
    weights=SIZES,
    base=SIZES,
    one=st.integers(1, 64 * GIB),
    sequences=st.integers(1, 1024),
)
def test_a_cpu_plan_never_goes_over_the_cap_and_holds_one_sequence(
    *, limit: int, cap: int, weights: int, base: int, one: int, sequences: int
) -> None:
    needs = CpuNeeds(weights, base, one, one * sequences)
    if weights + base + one > limit * cap // 100:
        with pytest.raises(StartRefusedError) as refused:
            plan_cpu(limit_bytes=limit, cap_percent=cap, needs=needs)
        assert refused.value.death is DeathClass.HOST_OUT_OF_MEMORY
        return
    kv = plan_cpu(limit_bytes=limit, cap_percent=cap, needs=needs).kv_cache_bytes
    assert kv is not None
    assert one <= kv <= one * sequences
    assert weights + base + kv <= limit * cap // 100


def test_a_refusal_spells_out_the_sum_and_the_least_that_would_do() -> None:
    """weights 14.9 + base 2.1 + one sequence 1.0 = 18.0 GiB, which is 80% of 22.5 GiB."""
    needs = CpuNeeds(int(14.9 * GIB), int(2.1 * GIB), GIB, 64 * GIB)
    with pytest.raises(StartRefusedError) as refused:
        plan_cpu(limit_bytes=16 * GIB, cap_percent=80, needs=needs)
    text = str(refused.value)
    assert "weights 14.90 GiB + base 2.10 GiB + one sequence 1.00 GiB > 80% of 16.00 GiB" in text
    assert "at least 22.5 GiB" in text
    plan_cpu(limit_bytes=int(22.5 * GIB), cap_percent=80, needs=needs)


@given(
    total=st.integers(4 * GIB, 192 * GIB),
    cap=st.integers(10, 80),
    measured=st.none() | st.integers(-GIB, 8 * GIB),
    weights=SIZES,
)
def test_a_cuda_plan_leaves_the_reserve_below_the_cap(
    total: int, cap: int, measured: int | None, weights: int
) -> None:
    reserve = desired_device_reserve_bytes(total, measured)
    assert reserve >= max(0, measured or 0)
    arguments = {
        "total_bytes": total,
        "cap_percent": cap,
        "reserve_bytes": reserve,
        "weights_bytes_per_rank": weights,
    }
    room = total * cap // 100 - reserve
    if room < max(weights, total * DEVICE_MIN_UTILIZATION):
        with pytest.raises(StartRefusedError) as refused:
            plan_device(**arguments)
        assert refused.value.death is DeathClass.CUDA_OUT_OF_MEMORY
        return
    utilization = plan_device(**arguments).gpu_memory_utilization
    assert utilization is not None
    assert 0 < utilization * total + reserve <= total * cap / 100 + 1


def test_an_80_gib_device_without_a_measurement_gets_78_percent() -> None:
    plan = plan_device(
        total_bytes=80 * GIB,
        cap_percent=80,
        reserve_bytes=desired_device_reserve_bytes(80 * GIB),
        weights_bytes_per_rank=16 * GIB,
    )
    assert plan.gpu_memory_utilization == pytest.approx(0.78, abs=1e-4)


def test_a_measurement_replaces_the_general_base_but_never_halves_it() -> None:
    general = desired_cpu_base_bytes(ranks=1, activations_bytes=100 * MIB)
    measured = desired_cpu_base_bytes(
        ranks=1, activations_bytes=100 * MIB, measured_bytes=1800 * MIB
    )
    assert measured == pytest.approx(1800 * MIB * 1.05, abs=1)
    tiny = desired_cpu_base_bytes(ranks=1, activations_bytes=0, measured_bytes=1)
    assert tiny > general * 0.4


@given(st.integers(1, 32), st.integers(1, 32))
def test_more_ranks_and_more_tokens_never_need_less(ranks: int, more: int) -> None:
    def base(count: int, tokens: int) -> int:
        active = activations_bytes(
            tokens=tokens, sequences=64, hidden=4096, intermediate=14336, vocabulary=128_000
        )
        return desired_cpu_base_bytes(ranks=count, activations_bytes=active)

    assert base(ranks + more, 2048) > base(ranks, 2048)
    assert base(ranks, 2048 + more) > base(ranks, 2048)


def test_a_sequence_takes_whole_blocks_and_one_spare() -> None:
    assert sequence_bytes(1, 10) == 2 * 128 * 10
    assert sequence_bytes(128, 10) == 2 * 128 * 10
    assert sequence_bytes(129, 10) == 3 * 128 * 10


def a_model(directory: Path, config: dict[str, Any], tensors: dict[str, Any], body: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    header = json.dumps(tensors).encode()
    (directory / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + bytes(body)
    )
    return directory


CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
TENSORS = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "BF16", "shape": [10], "data_offsets": [0, 20]},
    "b": {"dtype": "I8", "shape": [6], "data_offsets": [20, 26]},
}


def test_facts_come_from_config_and_headers_alone(tmp_path: Path) -> None:
    facts = read_facts(a_model(tmp_path / "m", CONFIG, TENSORS, 26))
    assert (facts.parameters, facts.other_bytes) == (10, 6)
    assert facts.dtype is DType.BFLOAT16
    assert facts.weights_bytes(DType.BFLOAT16) == 26
    assert facts.weights_bytes(DType.FLOAT32) == 46
    assert facts.kv_bytes_per_token(DType.FLOAT32) == 2 * 2 * 2 * 16 * 4
    assert facts.max_length == 512


@pytest.mark.parametrize(
    ("named", "tokenizer", "length"),
    [
        ({}, None, 2048),
        ({"n_positions": 1024}, None, 1024),
        ({"max_position_embeddings": 4096, "seq_length": 2000}, None, 2000),
        ({"max_position_embeddings": 8192, "model_max_length": 131_072}, None, 131_072),
        ({"max_position_embeddings": 4096}, 512, 4096),
        ({"max_position_embeddings": 4096, "position_embedding_type": "absolute"}, 512, 512),
        ({"max_position_embeddings": 512, "position_embedding_type": "absolute"}, 1e30, 512),
        ({"max_position_embeddings": 512, "position_embedding_type": "absolute"}, math.inf, 512),
    ],
)
def test_the_longest_sequence_is_the_least_that_the_model_names(
    named: dict[str, int | str], tokenizer: float | None, length: int, tmp_path: Path
) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "max_position_embeddings"}
    model = a_model(tmp_path / "m", config | named, TENSORS, 26)
    if tokenizer is not None:
        text = json.dumps({"model_max_length": tokenizer})
        (model / "tokenizer_config.json").write_text(text)
    assert read_facts(model).max_length == length


def test_the_text_part_of_a_multimodal_config_counts(tmp_path: Path) -> None:
    nested = {"architectures": ["X"], "text_config": CONFIG}
    assert read_facts(a_model(tmp_path / "m", nested, TENSORS, 26)).layers == 2


def test_latent_attention_keeps_one_vector_a_layer(tmp_path: Path) -> None:
    latent = {**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert read_facts(a_model(tmp_path / "m", latent, TENSORS, 26)).kv_values_per_token == 2 * 576


@pytest.mark.parametrize(
    ("damage", "death", "says"),
    [
        (lambda d: (d / "config.json").unlink(), DeathClass.MODEL_NOT_FOUND, "no config.json"),
        (lambda d: (d / "model.safetensors").unlink(), DeathClass.MODEL_NOT_FOUND, "no weights"),
        (
            lambda d: (d / "config.json").write_text("{"),
            DeathClass.MODEL_NOT_READABLE,
            "config.json",
        ),
        (
            lambda d: (d / "config.json").write_text('{"num_hidden_layers": "many"}'),
            DeathClass.MODEL_NOT_READABLE,
            "not a number",
        ),
        (
            lambda d: (d / "model.safetensors").write_bytes(b"short"),
            DeathClass.MODEL_NOT_READABLE,
            "model.safetensors",
        ),
        (
            lambda d: (d / "model.safetensors").write_bytes(
                (d / "model.safetensors").read_bytes()[:-1]
            ),
            DeathClass.MODEL_NOT_READABLE,
            "ends after",
        ),
    ],
)
def test_a_damaged_model_is_refused_before_the_engine_starts(
    tmp_path: Path, damage: Any, death: DeathClass, says: str
) -> None:
    directory = a_model(tmp_path / "m", CONFIG, TENSORS, 26)
    damage(directory)
    with pytest.raises(StartRefusedError, match=says) as refused:
        read_facts(directory)
    assert refused.value.death is death


def test_a_missing_directory_is_model_not_found(tmp_path: Path) -> None:
    with pytest.raises(StartRefusedError, match=str(tmp_path / "absent")) as refused:
        read_facts(tmp_path / "absent")
    assert refused.value.death is DeathClass.MODEL_NOT_FOUND


def test_the_rank_of_adapters_is_rounded_up_to_a_kernel(tmp_path: Path) -> None:
    directory = a_model(tmp_path / "m", CONFIG, TENSORS, 26)
    for name, rank in (("x", 9), ("y", 30)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
    facts = read_facts(directory, [tmp_path / "x", tmp_path / "y"])
    assert (facts.largest_adapter_rank, lora_rank(facts.largest_adapter_rank)) == (30, 32)
    one = read_facts(directory, [tmp_path / "y"]).adapters_bytes(DType.FLOAT32)
    assert facts.adapters_bytes(DType.FLOAT32) == 2 * one, "every slot has the largest rank"
    assert read_facts(directory).adapters_bytes(DType.FLOAT32) == 0
    (tmp_path / "x" / "adapter_config.json").unlink()
    with pytest.raises(StartRefusedError, match="adapter_config") as refused:
        read_facts(directory, [tmp_path / "x"])
    assert refused.value.death is DeathClass.MODEL_NOT_FOUND


def test_the_memory_that_a_streamed_load_leaves_is_part_of_the_base_of_each_worker() -> None:
    of_directory, streamed = (
        desired_cpu_base_bytes(ranks=2, activations_bytes=0, streamed=streamed)
        for streamed in (False, True)
    )
    assert streamed - of_directory >= 2 * CPU_STREAMER_BYTES
    measured = desired_cpu_base_bytes(
        ranks=2, activations_bytes=0, measured_bytes=4 * GIB, streamed=True
    )
    assert measured == desired_cpu_base_bytes(
        ranks=2, activations_bytes=0, measured_bytes=4 * GIB
    ), "the last start's peak has it already"
