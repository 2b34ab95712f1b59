"""Routes as a worker process knows them."""

from __future__ import annotations

from fleetkeeper_gateway.batch.workers import routes as module
from fleetkeeper_gateway.batch.workers.routes import Routes


def test_a_route_is_asked_for_once_in_some_seconds() -> None:
    now, asked = 0.0, []

    def ask(key_id: str, model: str) -> None:
        asked.append((key_id, model))

    routes = Routes(ask, lambda: now)
    assert [routes("key-1", "m"), routes("key-1", "m")] == ["key-1/m", "key-1/m"]
    assert asked == [("key-1", "m")]
    routes.note("key-1", "m", "service team/chat")
    assert routes("key-1", "m") == "service team/chat"
    assert routes("key-2", "m") == "key-2/m"
    assert len(asked) == 2
    now = 6.0
    assert routes("key-1", "m") == "service team/chat", "the last one counts until the answer"
    assert asked[-1] == ("key-1", "m")
    assert len(asked) == 3


def test_any_number_of_models_takes_bounded_memory() -> None:
    routes = Routes(lambda key_id, model: routes.note(key_id, model, "x"), lambda: 0.0)
    for number in range(3 * module._MOST):
        assert routes("key-1", str(number)) == "x"
    assert len(routes._found) <= module._MOST
