"""Counting by vLLM's own classes, without an engine: no order of events makes the sums differ."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.engine.engine_environment import PYTHON

pytestmark = pytest.mark.timeout(600)

COUNT = """
import inspect, json, random, tempfile, time
from pathlib import Path
from types import SimpleNamespace

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats, PrefillStats

from fleetkeeper_engine.in_vllm.usage.accounts import CURRENT, Accounts
from fleetkeeper_engine.in_vllm.usage.hooks import install
from fleetkeeper_engine.shm.ledger import LedgerWriter

KIND = RequestOutputKind.DELTA
FIELDS = set(inspect.signature(EngineCoreRequest).parameters)
with tempfile.TemporaryDirectory() as directory:
    ledger = LedgerWriter.open(Path(directory) / "ledger")
    accounts = Accounts(ledger)
    installed = install(accounts)
    processor = OutputProcessor(None, log_stats=True)
    dice, running, requests = random.Random(3), [], []
    prompt = cached = answer = 0

    def request(name):
        values = dict.fromkeys(FIELDS) | {
            "request_id": name,
            "external_req_id": name.split("_")[0],
            "prompt_token_ids": [1, 2, 3],
            "sampling_params": SamplingParams(max_tokens=20, detokenize=False, output_kind=KIND),
            "arrival_time": time.time(),
            "resumable": False,
        }
        return EngineCoreRequest(**{key: values[key] for key in FIELDS if values[key] is not None or key in
            ("mm_features", "pooling_params", "eos_token_id", "lora_request", "cache_salt", "data_parallel_rank")})

    def output(sequence):
        prefill = None
        if sequence[1]:
            prefill, tokens = PrefillStats(), dice.randint(1, 90)
            prefill.set(tokens, dice.randint(0, tokens), 0)
            sequence[1] = False
        end = FinishReason.LENGTH if dice.random() < 0.15 else None
        if end:
            running.remove(sequence)
        new = [5] * dice.randint(1, 3)
        return EngineCoreOutput(
            request_id=sequence[0], new_token_ids=new, finish_reason=end, prefill_stats=prefill
        )

    for number in range(500):
        sender = SimpleNamespace(attempt=f"a{number}", request="r", key="k")
        account = accounts.open(sender if dice.random() < 0.7 else None, None)
        names = [f"{number}_{index}" for index in range(dice.choice([1, 1, 2]))]
        outside = CURRENT.set(account)
        for name in names:
            processor.add_request(request(name), "x", None, 0, RequestOutputCollector(KIND, name))
        CURRENT.reset(outside)
        requests.append((account, names))
        running += [[name, True] for name in names]
        for _ in range(4):
            step = IterationStats()
            some = dice.sample(running, min(len(running), 8))
            processor.process_outputs([output(one) for one in some], time.monotonic(), step)
            prompt += step.num_prompt_tokens
            cached += step.prompt_token_stats.cached_tokens
            answer += step.num_generation_tokens
        if dice.random() < 0.3:
            # Their outputs that are under way still come; vLLM does not count those.
            processor.abort_requests(dice.choice(requests)[1], internal=True)
    for account, names in requests:
        processor.abort_requests(names, internal=True)
        accounts.end(account)
    total, head = ledger.head.sums.total, ledger.head
    print(json.dumps({
        "installed": installed, "errors": head.errors, "entries": head.newest,
        "vllm": [prompt, cached, answer], "ours": [total.prompt, total.cached, total.answer],
    }))
"""


def test_sums_are_equal_whatever_the_order_of_events() -> None:
    """500 requests, some of two sequences; a third of the time one is aborted amid its outputs."""
    done = subprocess.run([PYTHON, "-c", COUNT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["installed"]
    assert found["vllm"] == found["ours"]
    assert min(found["vllm"]) > 1_000
    assert (found["errors"], found["entries"]) == (0, 500)
