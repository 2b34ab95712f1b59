"""vLLM's EngineCore around the made-up model, and its front end with our counting."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.live_scheduling import LiveScheduling
from fleetkeeper_engine.in_vllm.priority import PriorityRule
from fleetkeeper_engine.in_vllm.vllm_settings import ENVIRONMENT, SCHEDULER_FACTORY, VllmSettings
from fleetkeeper_engine.shm.layout import SchedulerBlock, SupervisorBlock
from fleetkeeper_engine.shm.region import ENVIRONMENT as REGION
from fleetkeeper_engine.shm.region import Region
from tests.support.vllm_core.model import BLOCK_TOKENS, STOP, MadeUpModel

RULE = PriorityRule(0, 30_000_000)
SEQUENCES = 16
TOKENS = 256
DELTA = RequestOutputKind.DELTA


@dataclass
class Sent:
    """A request, and the tokens that its client got."""

    name: str
    prompt: int
    most: int
    tier: Tier
    structured: bool
    collector: Any
    tokens: list[int]
    aborted: bool = False
    finish_reason: str = ""


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Core:
    """One EngineCore with live limits, and the requests sent to it."""

    def __init__(self, model: Path, directory: Path, *, v2: bool, blocks: int = 4096) -> None:
        path = directory / "region"
        self.region = Region.create(path)
        os.environ[REGION] = str(path)
        os.environ[ENVIRONMENT] = VllmSettings(
            max_sequences=SEQUENCES, max_tokens=TOKENS, min_tokens=32
        ).to_json()
        config = EngineArgs(
            model=str(model),
            max_model_len=512,
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=TOKENS,
            block_size=BLOCK_TOKENS,
            enable_prefix_caching=False,
            scheduling_policy="priority",
            scheduler_cls=SCHEDULER_FACTORY,
        ).create_engine_config()
        # The platform without a device turns it off, and cannot be asked for V2.
        config.scheduler_config.async_scheduling = True
        MadeUpModel.blocks = blocks
        with patch.object(VllmConfig, "use_v2_model_runner", v2):
            self.core = EngineCore(config, MadeUpModel, log_stats=True)
        self.scheduler = self.core.scheduler
        self.model: Any = self.core.model_executor
        self.processor = OutputProcessor(None, log_stats=True)
        self.stats = IterationStats()
        self.clock = Clock()
        self.live: LiveScheduling = self.scheduler._live
        self.live._clock = self.clock
        self.requests: list[Sent] = []
        self.generation = 0

    def limit(self, sequences: int, tokens: int = TOKENS) -> None:
        """Ask for limits, as the supervisor does."""
        self.generation += 1
        self.region.write_supervisor(
            SupervisorBlock(
                generation=self.generation,
                sequences=sequences,
                tokens=tokens,
                lease_deadline=self.clock.now + 1e6,
            )
        )

    def send(
        self,
        name: str,
        *,
        prompt: int = 8,
        most: int = 8,
        tier: Tier = Tier.STANDARD,
        structured: bool = False,
        resumable: bool = False,
    ) -> Sent:
        """Send a request as the API server does."""
        self.clock.now += 1e-6
        outputs = None
        if structured:
            outputs = StructuredOutputsParams(regex="[ab]{400}")
            outputs._backend = "xgrammar"
        parameters = SamplingParams(
            max_tokens=most,
            detokenize=False,
            output_kind=DELTA,
            stop_token_ids=[STOP],
            structured_outputs=outputs,
        )
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[7] * prompt,
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=name,
            priority=RULE.number(tier, round(self.clock.now * 1e6)),
            resumable=resumable,
        )
        sent = Sent(name, prompt, most, tier, structured, RequestOutputCollector(DELTA, name), [])
        self.processor.add_request(request, None, None, 0, sent.collector)
        self.core.add_request(*self.core.preprocess_add_request(request))
        self.requests.append(sent)
        return sent

    def abort(self, sents: Iterable[Sent]) -> None:
        """Abort requests as a client that hangs up: the core hears of it while it waits for a step."""
        names = [sent.name for sent in sents]
        for sent in sents:
            sent.aborted = True
        self.processor.abort_requests(names, internal=True)
        self.core.aborts_queue.put(names)

    def step(self) -> None:
        """One turn of the core, and what came back of it."""
        self.clock.now += 0.06
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        for part in (outputs or {}).values():
            done = self.processor.process_outputs(part.outputs, time.monotonic(), self.stats)
            self.core.abort_requests(done.reqs_to_abort)
        for sent in self.requests:
            found = sent.collector.get_nowait()
            if found is not None and not sent.aborted:
                sent.tokens += found.outputs[0].token_ids
                sent.finish_reason = found.outputs[0].finish_reason or ""

    def run(self, most: int = 4000) -> None:
        """Step until nothing is left, also under way."""
        for _ in range(most):
            if not self.scheduler.has_requests() and not self.core.batch_queue:
                return
            self.step()
        raise AssertionError(f"requests are left after {most} steps: {self.block()}")

    def block(self) -> SchedulerBlock:
        """What our scheduler reports."""
        found = self.region.read_scheduler()
        assert found is not None
        return found
