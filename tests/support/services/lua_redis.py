"""Scripts of the limits in Lua 5.1 with the commands that they call, and a clock that a test turns."""

from __future__ import annotations

from typing import Any

from lupa import lua51

from fleetkeeper_gateway.limits.scripts import Script


def _text(value: Any) -> str:
    """A value as Redis takes it from Lua."""
    if isinstance(value, bytes):
        return value.decode()
    return f"{value:.17g}" if isinstance(value, float) else str(value)


class LuaRedis:
    """The few commands that the scripts use, with Redis' rules of expiry."""

    def __init__(self) -> None:
        self.now = 1_800_000_000_000
        """Server time in ms."""
        self._values: dict[str, Any] = {}
        self._until: dict[str, int] = {}
        self._lua = lua51.LuaRuntime(unpack_returned_tuples=False)
        self._functions: dict[bytes, Any] = {}

    def run(self, script: Script, keys: tuple[bytes, ...], *arguments: object) -> bytes:
        """Run a script and return its answer."""
        function: Any = self._functions.get(script.digest)
        if function is None:
            text = script.text.decode()
            function = self._lua.eval(f"function(redis, KEYS, ARGV)\n{text}\nend")
            self._functions[script.digest] = function
        redis = self._lua.table_from({"call": self._call})
        table = self._lua.table_from
        answer = function(
            redis, table([k.decode() for k in keys]), table([_text(a) for a in arguments])
        )
        return str(answer).encode()

    def _call(self, command: str, *words: Any) -> Any:
        for key in [key for key, until in self._until.items() if self.now > until]:
            self._drop(key)
        found = getattr(self, f"_{command.lower()}")(*map(_text, words))
        if isinstance(found, list):
            return self._lua.table_from([False if each is None else each for each in found])
        return False if found is None else found

    def _drop(self, key: str) -> None:
        self._values.pop(key, None)
        self._until.pop(key, None)

    def _time(self) -> list[str]:
        return [str(self.now // 1000), str(self.now % 1000 * 1000)]

    def _pttl(self, key: str) -> int:
        return self._until[key] - self.now if key in self._until else -2

    def _pexpire(self, key: str, ms: str) -> int:
        if key in self._values:
            self._until[key] = self.now + int(ms)
        return 1

    def _get(self, key: str) -> str | None:
        found: str | None = self._values.get(key)
        return found

    def _set(self, key: str, value: str, px: str, ms: str) -> str:
        assert px.upper() == "PX"
        self._values[key], self._until[key] = value, self.now + int(ms)
        return "OK"

    def _exists(self, key: str) -> int:
        return int(key in self._values)

    def _incrby(self, key: str, amount: str) -> int:
        self._values[key] = str(int(self._values.get(key, 0)) + int(amount))
        return int(self._values[key])

    def _rename(self, old: str, new: str) -> str:
        value, until = self._values[old], self._until[old]
        self._drop(old)
        self._values[new], self._until[new] = value, until
        return "OK"

    def _hget(self, key: str, field: str) -> str | None:
        found: str | None = self._values.get(key, {}).get(field)
        return found

    def _hmget(self, key: str, *fields: str) -> list[str | None]:
        return [self._hget(key, field) for field in fields]

    def _hset(self, key: str, *pairs: str) -> int:
        self._values.setdefault(key, {}).update(zip(pairs[::2], pairs[1::2], strict=True))
        return 1

    def _hdel(self, key: str, *fields: str) -> int:
        return self._remove(key, fields)

    def _zrem(self, key: str, *members: str) -> int:
        return self._remove(key, members)

    def _remove(self, key: str, members: tuple[str, ...]) -> int:
        held = self._values.get(key, {})
        for member in members:
            held.pop(member, None)
        if not held:
            self._drop(key)
        return 1

    def _zadd(self, key: str, score: str, member: str) -> int:
        self._values.setdefault(key, {})[member] = float(score)
        return 1

    def _zcount(self, key: str, low: str, high: str) -> int:
        assert (low[0], high) == ("(", "+inf")
        return sum(score > float(low[1:]) for score in self._values.get(key, {}).values())

    def _zrangebyscore(self, key: str, low: str, high: str, *_limit: str) -> list[str]:
        assert low == "-inf"
        found = sorted((score, member) for member, score in self._values.get(key, {}).items())
        return [member for score, member in found if score <= float(high)][:100]

    def _zremrangebyscore(self, key: str, low: str, high: str) -> int:
        return self._remove(key, tuple(self._zrangebyscore(key, low, high)))
