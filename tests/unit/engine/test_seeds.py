"""Sampling without the generators of prompts in parts, on stand-ins with the names of vLLM's code."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fleetkeeper_engine.in_vllm import plugin
from fleetkeeper_engine.in_vllm.seeds import keep_generators
from fleetkeeper_engine.shm.region import Region

ROWS = 4


class Generator:
    """A generator of torch for CPU."""

    def __init__(self) -> None:
        self.draws = 0

    def get_offset(self) -> int:
        raise RuntimeError("CPU Generator does not use offset")

    def set_offset(self, _: int) -> None:
        raise RuntimeError("CPU Generator does not use offset")


class Runner:
    """A model runner of vLLM: it draws for each row and sets back those of discarded rows."""

    def __init__(self) -> None:
        self.discard_request_mask = SimpleNamespace(np=[False] * ROWS)
        generators: dict[int, Generator] = {}
        metadata = SimpleNamespace(generators=generators)
        self.input_batch = SimpleNamespace(generators=generators, sampling_metadata=metadata)

    def sample_tokens(self, grammar: str) -> str:
        self._sample()
        self._bookkeeping_sync()
        return grammar

    def _sample(self) -> None:
        for generator in self.input_batch.sampling_metadata.generators.values():
            generator.draws += 1

    def _bookkeeping_sync(self) -> None:
        for row in range(ROWS):
            if self.discard_request_mask.np[row]:
                generator = self.input_batch.generators.get(row)
                if generator is not None:
                    generator.set_offset(generator.get_offset() - 4)


class WithoutOffsets(Runner):
    """What vLLM may become."""

    def _bookkeeping_sync(self) -> None:
        return


class SampledElsewhere(Runner):
    """Another order of the steps."""

    def sample_tokens(self, grammar: str) -> str:
        return grammar


class Copying(Runner):
    """A sampler that gets a copy of the generators."""

    def __init__(self) -> None:
        super().__init__()
        self.input_batch.sampling_metadata.generators = {}


class WithoutMask(Runner):
    """A runner that marks the discarded rows in another way."""

    def __init__(self) -> None:
        super().__init__()
        del self.discard_request_mask


def worker_with(runner: object, kind: str = "cpu") -> SimpleNamespace:
    device = SimpleNamespace(type=kind, index=0)
    worker = SimpleNamespace(device=device, model_runner=runner, rank=0, load_model=lambda: None)
    return SimpleNamespace(worker=worker)


def test_a_discarded_row_draws_nothing_and_the_others_draw_as_before() -> None:
    """A row that is discarded in one step and kept in the next draws once: the generator is back."""
    runner = Runner()
    generators = runner.input_batch.generators
    seeded = {0: Generator(), 1: Generator(), 3: Generator()}
    generators.update(seeded)
    runner.discard_request_mask.np[:] = [True, False, True, False]
    keep_generators(worker_with(runner))
    assert runner.sample_tokens("a grammar") == "a grammar"
    assert {row: found.draws for row, found in seeded.items()} == {0: 0, 1: 1, 3: 1}
    assert runner.input_batch.generators is generators
    assert generators == seeded
    runner.discard_request_mask.np[:] = [False] * ROWS
    runner.sample_tokens("")
    assert {row: found.draws for row, found in seeded.items()} == {0: 1, 1: 2, 3: 2}


def test_the_stand_in_fails_as_vllm_does_without_the_change() -> None:
    """Or the test above would show nothing."""
    runner = Runner()
    runner.input_batch.generators[0] = Generator()
    runner.discard_request_mask.np[0] = True
    with pytest.raises(RuntimeError, match="does not use offset"):
        runner.sample_tokens("")


def test_a_step_that_fails_loses_no_generator() -> None:
    """The next step finds them."""

    class Failing(Runner):
        def _sample(self) -> None:
            raise ValueError("a fault of a step")

    runner = Failing()
    seeded = runner.input_batch.generators[0] = Generator()
    runner.discard_request_mask.np[0] = True
    keep_generators(worker_with(runner))
    with pytest.raises(ValueError, match="a fault of a step"):
        runner.sample_tokens("")
    assert runner.input_batch.generators == {0: seeded}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (SimpleNamespace, "SimpleNamespace has no method sample_tokens"),
        (WithoutOffsets, "WithoutOffsets._bookkeeping_sync does not use discard_request_mask"),
        (SampledElsewhere, "SampledElsewhere.sample_tokens does not use _sample"),
        (Copying, "the sampler does not get the generators of the batch"),
        (WithoutMask, "discard_request_mask is no buffer"),
    ],
)
def test_a_runner_with_other_code_is_left_alone_and_the_log_says_why(
    make: Callable[[], Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make()
    before = dict(vars(runner))
    keep_generators(worker_with(runner))
    assert vars(runner) == before
    assert said in caplog.text


def test_a_worker_of_another_device_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The generators of CUDA have offsets."""
    runner = Runner()
    before = dict(vars(runner))
    keep_generators(worker_with(runner, "cuda"))
    assert vars(runner) == before
    assert not caplog.text


def test_a_failure_here_does_not_keep_a_worker_from_its_start(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(Runner):
        @property
        def sample_tokens(self) -> Any:
            raise ValueError("not yet")

    worker = worker_with(Raising())
    plugin.prepare_worker(worker)
    assert "requests with a seed are left to vLLM as it is" in caplog.text
    worker.worker.load_model()
    assert region.all_loaded() is not None
