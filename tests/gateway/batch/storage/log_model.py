"""An exhaustive model of a chunk's log: every order of the calls of its writers and readers, and every fault.

Actors are coroutines that use real `ChunkLog` objects. Each call to the store is a point where any other
actor may go on instead. What an actor does next follows from the answers that it got. So a state is what
the store has and what each actor was answered: one that was reached before is not explored again, but its
interleavings are counted.
"""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from fleetkeeper_gateway.batch.interfaces import Object, StorageError
from fleetkeeper_gateway.batch.model import Result
from fleetkeeper_gateway.batch.storage import paths
from tests.support.batch.batch_storage import KEY, batch_id

PATH: Final = partial(paths.log_part, KEY, batch_id(1), 0)

CRASHES: Final = ("crash before", "crash after")
"""The actor ends before or after its call is done."""
UNSEEN: Final = "not seen"
"""A read does not find an object that exists, as it may be for some seconds on a network file system."""
ERRORS: Final = ("failed", "lost")
"""The call is answered with an error. It was not done, or it was."""


class Call(NamedTuple):
    """A call to the store."""

    what: str
    path: str
    argument: Any = None

    def __await__(self) -> Generator[Call, Any, Any]:
        """Wait until the explorer does it."""
        return (yield self)

    def do(self, objects: dict[str, bytes]) -> Any:
        """Do it at once. Return the answer."""
        found = objects.get(self.path)
        if self.what == "create":
            objects.setdefault(self.path, self.argument)
            return found is None
        if self.what == "damage" and found is not None:
            objects[self.path] = found[:-9] + bytes([found[-9] ^ 1]) + found[-8:]
        if self.what == "read_range":
            offset, length = self.argument
            return (found or b"")[offset : offset + length]
        return found if self.what == "read" else None


class ModelStore:
    """A store whose calls return when the explorer says so."""

    async def create(self, path: str, data: bytes) -> bool:
        return bool(await Call("create", path, data))

    async def read(self, path: str) -> bytes | None:
        found: bytes | None = await Call("read", path)
        return found

    async def read_range(self, path: str, offset: int, length: int) -> bytes:
        return bytes(await Call("read_range", path, (offset, length)))

    async def write(self, path: str, parts: AsyncIterator[bytes]) -> int:
        raise NotImplementedError

    def stream(self, path: str) -> AsyncIterator[bytes]:
        raise NotImplementedError

    async def list(self, prefix: str, *, after: str = "") -> Sequence[Object]:
        raise NotImplementedError

    async def delete(self, paths: Iterable[str]) -> None:
        raise NotImplementedError


STORE: Final = ModelStore()


def at_once(objects: dict[str, bytes], work: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine returns if nothing comes between its calls."""
    answer: Any = None
    while True:
        try:
            answer = work.send(answer).do(objects)
        except StopIteration as end:
            return end.value


@dataclass
class Notes:
    """What an actor noted for the checks."""

    counted: set[Result] = field(default_factory=set)
    """Results that count, as `append` said."""
    closed: bool = False
    """Whether it knew at its end that the log is closed."""
    output: tuple[Result, ...] | None = None


class Noted(NamedTuple):
    """The same, when it does not change any more."""

    counted: frozenset[Result]
    closed: bool
    output: tuple[Result, ...] | None


Script = Callable[[Notes], Coroutine[Any, Any, None]]


class Actor(NamedTuple):
    """An actor at one time."""

    script: int
    answers: tuple[object, ...] = ()
    """Those that it got. An error is an answer."""
    noted: Noted | None = None
    """Once it has ended; then its answers do not matter."""


class State(NamedTuple):
    """Everything at one time."""

    objects: tuple[tuple[str, bytes], ...]
    actors: tuple[Actor, ...]
    faults: int
    """How many may come yet."""

    @property
    def notes(self) -> Sequence[Noted]:
        """Return what the actors that have ended noted."""
        return [actor.noted for actor in self.actors if actor.noted is not None]


@dataclass(frozen=True)
class Explored:
    """How much there was."""

    interleavings: int
    states: int
    ends: int


class Explorer:
    """Explores all that actors can do."""

    def __init__(self, scripts: Sequence[Script], check: Callable[[State], None]) -> None:
        self._scripts = scripts
        self._check = check
        self._steps: dict[Actor, tuple[Call | None, Noted]] = {}
        self._counts: dict[State, int] = {}
        self._ends = 0

    def explore(self, faults: int) -> Explored:
        """Check every end to which actors come, with at most so many faults.

        Raises:
            AssertionError: if a check fails, with the interleaving.
        """
        actors = tuple(self._now(Actor(number)) for number in range(len(self._scripts)))
        interleavings = self._visit(State((), actors, faults), [])
        return Explored(interleavings, len(self._counts), self._ends)

    def _visit(self, state: State, way: list[str]) -> int:
        """Return the number of interleavings from a state on."""
        known = self._counts.get(state)
        if known is not None:
            return known
        total = 0
        waiting = [number for number, actor in enumerate(state.actors) if actor.noted is None]
        for number in waiting:
            for what, after in self._next(state, number):
                total += self._visit(after, [*way, f"actor {number}: {what}"])
        if not waiting:
            total = 1
            self._ends += 1
            try:
                self._check(state)
            except AssertionError as error:
                error.add_note("\n".join(way))
                raise
        self._counts[state] = total
        return total

    def _next(self, state: State, number: int) -> Iterable[tuple[str, State]]:
        """Return what can happen to the call of an actor, and the state after it."""
        actor = state.actors[number]
        call, noted = self._step(actor)
        assert call is not None
        objects = dict(state.objects)
        answer = call.do(objects)
        done = tuple(sorted(objects.items()))
        name = f"{call.what} {call.path.rpartition('/')[2]}"

        def after(what: str, is_done: bool, then: Actor) -> tuple[str, State]:
            actors = (*state.actors[:number], then, *state.actors[number + 1 :])
            faults = state.faults - (what != "done")
            kept = done if is_done else state.objects
            return f"{name}: {what}", State(kept, actors, faults)

        yield after("done", True, self._now(actor._replace(answers=(*actor.answers, answer))))
        if not state.faults:
            return
        ended = Actor(actor.script, (), noted)
        failed = self._now(actor._replace(answers=(*actor.answers, StorageError)))
        if call.what == "read" and answer is not None:
            yield after(UNSEEN, False, self._now(actor._replace(answers=(*actor.answers, None))))
        changes = done != state.objects
        for is_done in (False, True)[: 1 + changes]:
            yield after(CRASHES[is_done], is_done, ended)
            yield after(ERRORS[is_done], is_done, failed)

    def _now(self, actor: Actor) -> Actor:
        """Return an actor without its answers if it has ended."""
        call, noted = self._step(actor)
        return actor if call is not None else Actor(actor.script, (), noted)

    def _step(self, actor: Actor) -> tuple[Call | None, Noted]:
        """Return what an actor does after its answers, and what it has noted."""
        if actor not in self._steps:
            self._steps[actor] = self._replayed(actor)
        return self._steps[actor]

    def _replayed(self, actor: Actor) -> tuple[Call | None, Noted]:
        notes = Notes()
        work = self._scripts[actor.script](notes)
        call: Call | None
        try:
            call = work.send(None)
            for answer in actor.answers:
                if answer is StorageError:
                    call = work.throw(StorageError("the model says so"))
                else:
                    call = work.send(answer)
        except (StopIteration, StorageError):
            call = None
        noted = Noted(frozenset(notes.counted), notes.closed, notes.output)
        work.close()
        return call, noted
