"""A naive engine under closed-loop load: every step and every sequence one by one.

It is the second implementation beside `fleetkeeper.simulate`, for comparison, and favors clarity over
speed. Steps follow vLLM's V1 scheduler: running requests first, in order of admission, then waiting
ones, from one token budget. A sequence without room in the KV cache preempts the last one admitted,
whose tokens are computed again. A step that preempts admits nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from statistics import mean, median

from fleetkeeper_steps.hardware import Hardware


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A closed loop of `concurrency` clients that send `requests` in all.

    `prompt`, `generated`: most tokens of a request; lengths are uniform between `shortest` of them and
    all of them. `max_tokens`: token budget of a step. At most `concurrency` sequences run.
    """

    concurrency: int
    prompt: int
    generated: int
    requests: int
    shortest: float = 1.0
    max_tokens: int = 8192
    seed: int = 1

    def lengths(self) -> list[tuple[int, int]]:
        """Return prompt and generated tokens of every request."""
        random = Random(self.seed)
        return [
            (
                random.randint(int(self.shortest * self.prompt), self.prompt),
                random.randint(int(self.shortest * self.generated), self.generated),
            )
            for _ in range(self.requests)
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Medians and a mean in seconds; preemptions, and steps that could not admit, as the KV cache was full."""

    ttft_s: float
    mean_ttft_s: float
    tpot_s: float
    preemptions: int
    waited_steps: int = 0

    @classmethod
    def of(
        cls, ttft_s: list[float], tpot_s: list[float], preemptions: int, waited_steps: int = 0
    ) -> Outcome:
        """Return the outcome of requests with these times."""
        return cls(median(ttft_s), mean(ttft_s), median(tpot_s), preemptions, waited_steps)


@dataclass(slots=True)
class Sequence:
    """A request: tokens to compute (`needed`) and computed, tokens generated, and its times."""

    sent: float
    generated_limit: int
    needed: int
    computed: int = 0
    generated: int = 0
    first: float = 0.0
    ended: float = 0.0


@dataclass
class NaiveEngine:
    """An engine with its running and waiting sequences."""

    hardware: Hardware
    load: ClosedLoop
    now: float = 0.0
    kv_tokens: int = 0
    running: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)
    preemptions: int = 0
    waited_steps: int = 0

    def step(self) -> list[Sequence]:
        """Run one step, advance the time, and return the sequences that end."""
        chunks, preempted = self._running_chunks()
        admitted = [] if preempted else self._admitted(self.load.max_tokens - _tokens(chunks))
        chunks += admitted
        prefill, sequences, pairs = 0, 0, 0.0
        for sequence, chunk in chunks:
            if sequence.generated and sequence.computed + 1 == sequence.needed:
                sequences += 1
            else:
                prefill += chunk
                pairs += chunk * (sequence.computed + chunk / 2)
        first = sum(not sequence.generated for sequence, _ in admitted)
        self.now += self.hardware.step_time_s(prefill, sequences, self.kv_tokens, pairs, first)
        return [sequence for sequence, chunk in chunks if self._computed(sequence, chunk)]

    def _running_chunks(self) -> tuple[list[tuple[Sequence, int]], bool]:
        """Return the chunks of running sequences, and whether any sequence was preempted."""
        chunks: list[tuple[Sequence, int]] = []
        budget, position, preempted = self.load.max_tokens, 0, False
        while position < len(self.running) and budget > 0:
            sequence = self.running[position]
            chunk = min(sequence.needed - sequence.computed, budget)
            if self.kv_tokens + chunk > self.hardware.kv_capacity_tokens:
                self._preempt()
                preempted = True
                continue
            self.kv_tokens += chunk
            budget -= chunk
            chunks.append((sequence, chunk))
            position += 1
        return chunks, preempted

    def _preempt(self) -> None:
        last = self.running.pop()
        self.kv_tokens -= last.computed
        last.computed = 0
        self.waiting.appendleft(last)
        self.preemptions += 1

    def _admitted(self, budget: int) -> list[tuple[Sequence, int]]:
        chunks: list[tuple[Sequence, int]] = []
        while self.waiting and budget > 0 and len(self.running) < self.load.concurrency:
            sequence = self.waiting[0]
            chunk = min(sequence.needed, budget)
            if self.kv_tokens + chunk > self.hardware.kv_capacity_tokens:
                self.waited_steps += 1
                break
            self.running.append(self.waiting.popleft())
            self.kv_tokens += chunk
            budget -= chunk
            chunks.append((sequence, chunk))
        return chunks

    def _computed(self, sequence: Sequence, chunk: int) -> bool:
        """Add a computed chunk to a sequence, and return whether the sequence ends."""
        sequence.computed += chunk
        if sequence.computed < sequence.needed:
            return False
        if not sequence.generated:
            sequence.first = self.now
        sequence.generated += 1
        sequence.needed += 1
        if sequence.generated < sequence.generated_limit:
            return False
        sequence.ended = self.now
        self.running.remove(sequence)
        self.kv_tokens -= sequence.computed
        return True


def _tokens(chunks: list[tuple[Sequence, int]]) -> int:
    return sum(chunk for _, chunk in chunks)


def simulate(hardware: Hardware, load: ClosedLoop) -> Outcome:
    """Return the medians of a closed loop. Every client sends its next request when one ends."""
    lengths = deque(load.lengths())
    longest = load.prompt + load.generated
    if longest > hardware.kv_capacity_tokens:
        raise ValueError(
            f"A request of {longest} tokens does not fit in the KV cache of {hardware.name} "
            f"({hardware.kv_capacity_tokens:.0f} tokens)."
        )
    engine = NaiveEngine(hardware, load)
    ended: list[Sequence] = []
    for _ in range(min(load.concurrency, load.requests)):
        _send(engine, lengths)
    while engine.running or engine.waiting:
        finished = engine.step()
        ended += finished
        for _ in finished:
            if lengths:
                _send(engine, lengths)
    return Outcome.of(
        [sequence.first - sequence.sent for sequence in ended],
        [(row.ended - row.first) / max(1, row.generated - 1) for row in ended],
        engine.preemptions,
        engine.waited_steps,
    )


def _send(engine: NaiveEngine, lengths: deque[tuple[int, int]]) -> None:
    prompt, generated = lengths.popleft()
    engine.waiting.append(Sequence(engine.now, generated, prompt))
