"""Run the cases in one process, and write what each came to into a file, as JSON.

.venv-engine/bin/python -m tests.support.vllm_core.run MODEL DIRECTORY ANSWERS
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from fleetkeeper_contract.tiers import TIERS, Tier
from fleetkeeper_engine.in_vllm.realtime_reserve import progressing_tokens
from fleetkeeper_engine.in_vllm.scheduler import LiveLimits
from fleetkeeper_engine.in_vllm.scheduler_facts import is_blocked
from fleetkeeper_engine.in_vllm.usage.accounts import CURRENT, Accounts
from fleetkeeper_engine.in_vllm.usage.hooks import install
from fleetkeeper_engine.shm.ledger import LedgerWriter
from tests.support.vllm_core.core import SEQUENCES, TOKENS, Core, Sent
from tests.support.vllm_core.model import STOP, made_up_token

Facts = dict[str, Any]


class Cases:
    """What is tested; each method is a case."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model, self._directory = model, directory
        self.ledger = LedgerWriter.open(directory / "ledger")
        self.accounts = Accounts(self.ledger)
        self.installed = install(self.accounts)

    def core(self, name: str, **options: Any) -> Core:
        """A core with a region of its own."""
        directory = self._directory / name
        directory.mkdir()
        return Core(self._model, directory, **options)

    def chosen(self) -> Facts:
        """The class that vLLM makes with our --scheduler-cls."""
        core = self.core("chosen", v2=True)
        return {
            "asynchronous": isinstance(core.scheduler, AsyncScheduler),
            "ours": isinstance(core.scheduler, LiveLimits),
            "supported": core.block().supported,
            "queue": core.core.batch_queue_size,
            "v2": core.scheduler.use_v2_model_runner,
        }

    def load_v1(self) -> Facts:
        """Everything at once, with the worker's protocol of model runner V1."""
        return self.load("load_v1", v2=False)

    def load_v2(self) -> Facts:
        """Everything at once, with the worker's protocol of model runner V2."""
        return self.load("load_v2", v2=True)

    def load(self, name: str, *, v2: bool) -> Facts:
        """Requests of all tiers, aborts, preemptions and grammars while limits go down and up."""
        core = self.core(name, v2=v2, blocks=34)
        watch = Watch(core)
        dice, before = random.Random(5), self.ledger.head.sums.total
        accounts = []
        for number in range(240):
            account = self.accounts.open(None, None)
            context = CURRENT.set(account)
            stop = f"-stop-{dice.randint(0, 30)}" if dice.random() < 0.5 else ""
            core.send(
                f"{number}{stop}",
                prompt=dice.randint(1, 120),
                most=dice.randint(1, 60),
                tier=dice.choice(TIERS),
                structured=not stop and dice.random() < 0.3,
            )
            CURRENT.reset(context)
            accounts.append(account)
            if dice.random() < 0.2:
                core.limit(dice.randint(1, SEQUENCES), dice.randint(32, TOKENS))
            if dice.random() < 0.2:
                living = [sent for sent in core.requests if not sent.finish_reason]
                core.abort([dice.choice(living)])
            for _ in range(dice.randint(0, 6)):
                core.step()
        core.run()
        for account in accounts:
            self.accounts.end(account)
        block, after = core.block(), self.ledger.head.sums.total
        return {
            "wrong": [sent.name for sent in core.requests if not is_right(sent)],
            "violations": watch.violations,
            "generated": block.generation_tokens,
            "emitted": watch.emitted,
            "usage": [after.prompt - before.prompt, after.answer - before.answer],
            "vllm": [core.stats.num_prompt_tokens, core.stats.num_generation_tokens],
            "preemptions": [block.preemptions, watch.preemptions],
            "waits": [sum(block.queue_wait_buckets), watch.first],
            "steps": [
                block.worked_steps,
                len([s for s in core.model.steps if s.num_scheduled_tokens]),
            ],
            "deferred": watch.deferred,
            "left": [*block.running, *block.waiting, *heartbeat(core), block.blocked],
            "live": core.scheduler._live is not None,
            "aborted": sum(sent.aborted for sent in core.requests),
            "structured": sum(sent.structured and bool(sent.tokens) for sent in core.requests),
        }

    def session(self) -> Facts:
        """A session whose client has not sent its next input holds its KV cache outside the queue."""
        core = self.core("session", v2=True)
        core.send("session", most=3, resumable=True)
        while core.scheduler.running or core.core.batch_queue or not core.model.steps:
            core.step()
        core.send("other", most=3)
        while len(core.requests[1].tokens) < 3:
            core.step()
        block = core.block()
        return {"waiting": block.waiting, "blocked": block.blocked, "running": block.running}

    def grammar(self) -> Facts:
        """A realtime request waits for its grammar while a batch request waits for a slot."""
        core = self.core("grammar", v2=True)
        core.send("first", most=2, tier=Tier.REALTIME)
        core.run()
        core.limit(8)
        for number in range(12):
            core.send(f"batch {number}", most=200, tier=Tier.BATCH)
        for _ in range(4):
            core.step()
        kept = len(core.scheduler.running)
        compiling: Future[Any] = Future()
        core.send("blocked", tier=Tier.REALTIME, structured=True)
        core.scheduler.requests["blocked"].structured_output_request.grammar = compiling
        for _ in range(4):
            core.step()
        found = len(core.scheduler.running)
        core.send("ready", most=50, tier=Tier.REALTIME)
        core.step()
        names = [request.request_id for request in core.scheduler.running]
        return {"kept": kept, "found": found, "ready": "ready" in names}


class Watch:
    """What vLLM did at each schedule call, against the limits that held."""

    def __init__(self, core: Core) -> None:
        self.violations: list[str] = []
        self.emitted = self.preemptions = self.first = self.deferred = 0
        self._core, self._seen = core, set[str]()
        execute, update = core.model.execute_model, core.scheduler.update_from_output
        schedule = core.scheduler.schedule

        def scheduled(*arguments: Any) -> Any:
            self._running = len(core.scheduler.running)
            return schedule(*arguments)

        def executed(step: Any, non_block: bool = False) -> Any:
            self._check(step)
            return execute(step, non_block)

        def updated(step: Any, output: Any) -> Any:
            result = update(step, output)
            for part in result.values():
                self.emitted += sum(len(one.new_token_ids) for one in part.outputs)
            return result

        core.scheduler.schedule = scheduled
        core.model.execute_model = executed
        core.scheduler.update_from_output = updated

    def _check(self, step: Any) -> None:
        scheduler, block = self._core.scheduler, self._core.region.read_supervisor()
        self.preemptions += len(step.preempted_req_ids)
        self.deferred += step.pending_structured_output_tokens
        new = [scheduler.requests[entry.req_id] for entry in step.scheduled_new_reqs]
        self.first += len({request.request_id for request in new} - self._seen)
        self._seen |= {request.request_id for request in new}
        sequences = min(SEQUENCES, block.sequences) if block else SEQUENCES
        tokens = min(TOKENS, max(32, block.tokens)) if block else TOKENS
        if len(scheduler.running) > max(sequences, self._running):
            self.violations.append(f"{len(scheduler.running)} run, the limit is {sequences}")
        if step.total_num_scheduled_tokens > progressing_tokens(tokens, TOKENS, self._running):
            self.violations.append(f"{step.total_num_scheduled_tokens} tokens, limit {tokens}")
        ready = [
            request.priority
            for request in scheduler.waiting
            if not is_blocked(request.status) and not request.num_stale_output_tokens
        ]
        if new and ready and max(request.priority for request in new) > min(ready):
            self.violations.append("a request was admitted before one that goes first")


def heartbeat(core: Core) -> tuple[int, int]:
    """Steps under way and the tokens in them."""
    found = core.region.read_heartbeat()
    return found.steps, found.tokens


def is_right(sent: Sent) -> bool:
    """Whether the client got the tokens that the model made up, in their order, and all of them."""
    stop = int(sent.name.rpartition("-")[2]) if "-stop-" in sent.name else sent.most
    whole = [made_up_token(sent.name, place) for place in range(sent.most)]
    if stop < sent.most:
        whole[stop:] = [STOP]
    if sent.structured:
        return sent.aborted or len(sent.tokens) == sent.most
    return sent.tokens == (whole[: len(sent.tokens)] if sent.aborted else whole)


def outcome(case: Callable[[], Facts]) -> Facts:
    """What a case came to, or how it failed."""
    try:
        return case()
    except Exception:  # noqa: BLE001 - the other cases go on, and the test fails with this
        return {"failed": traceback.format_exc()}


def main() -> None:
    """Run them all."""
    cases = Cases(Path(sys.argv[1]), Path(sys.argv[2]))
    names = ("chosen", "load_v1", "load_v2", "session", "grammar")
    found = {name: outcome(getattr(cases, name)) for name in names}
    Path(sys.argv[3]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
