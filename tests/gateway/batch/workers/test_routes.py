"""Routes as a worker process knows them."""

from __future__ import annotations

from fleetkeeper_gateway.batch.interfaces import Route
from fleetkeeper_gateway.batch.workers import routes as module
from fleetkeeper_gateway.batch.workers.routes import Routes
from tests.gateway.batch.workers.memory import KEY, batch_record


def test_a_route_is_asked_for_once_in_some_seconds() -> None:
    now, asked = 0.0, []

    def ask(key_id: str, model: str) -> None:
        asked.append((key_id, model))

    routes = Routes(ask, lambda: now)
    assert [routes("key-1", "m"), routes("key-1", "m")] == ["key-1/m", "key-1/m"]
    assert asked == [("key-1", "m")]
    routes.note("key-1", "m", Route("service team/chat"))
    assert routes("key-1", "m") == "service team/chat"
    assert routes("key-2", "m") == "key-2/m"
    assert len(asked) == 2
    now = 6.0
    assert routes("key-1", "m") == "service team/chat", "the last one counts until the answer"
    assert asked[-1] == ("key-1", "m")
    assert len(asked) == 3


def test_a_line_wakes_its_service_when_the_parent_says_so_or_once_half_of_its_window_has_passed() -> (
    None
):
    now, asked = 2799.0, []

    def ask(key_id: str, model: str) -> None:
        asked.append((key_id, model))

    routes = Routes(ask, lambda: now, lambda: now)
    batch = batch_record(created=1000, expires=4600)
    assert routes.wake(batch, "m") is None
    assert asked == [(KEY, "m")]
    routes.note(KEY, "m", Route("service team/chat", "always"))
    assert routes.wake(batch, "m") == "always"
    assert routes.wake(batch, "n") is None
    now = 2805.0
    assert routes.wake(batch, "n") == "deadline", "also while its service is unknown"
    assert routes.wake(batch, "m") == "always"
    assert asked[2:] == [(KEY, "n"), (KEY, "m")], "a chunk that is held for long asks again"


def test_any_number_of_models_takes_bounded_memory() -> None:
    routes = Routes(lambda key_id, model: routes.note(key_id, model, Route("x")), lambda: 0.0)
    for number in range(3 * module._MOST):
        assert routes("key-1", str(number)) == "x"
    assert len(routes._found) <= module._MOST
