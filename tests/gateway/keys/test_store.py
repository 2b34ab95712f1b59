"""The known keys: by digest, each on its own, with what is reported of their changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from fleetkeeper_contract.client_key_entries import digest_of
from fleetkeeper_gateway.keys.store import KeyStore
from tests.support.gateway.client_keys import (
    NAMESPACE,
    RecordedAudit,
    key_entries,
    key_of,
    key_secret,
)

PAST, FUTURE = "2020-01-01T00:00:00Z", "2100-01-01T00:00:00Z"


class World:
    """A store whose first list is finished, and what it recorded."""

    def __init__(self) -> None:
        self.audit = RecordedAudit()
        self.store = KeyStore(self.audit)
        self.store.listed()

    def put(self, secret_name: str, number: int, /, *, manager: str = "", **entries: str) -> None:
        secret = key_secret(secret_name, key_entries(key_of(number), **entries), manager=manager)
        self.store.put((NAMESPACE, secret_name), secret)

    def remove(self, name: str) -> None:
        self.store.remove((NAMESPACE, name))

    def owner(self, number: int) -> str | None:
        record = self.store.find(bytes.fromhex(digest_of(key_of(number))))
        return record.key.id if record else None

    def expired(self) -> list[str]:
        return [key for key, change, _ in self.audit.changes if change == "expired"]


@pytest.fixture
def world() -> World:
    return World()


def _gauge(name: str) -> float | None:
    return REGISTRY.get_sample_value(f"fleetkeeper_gateway_{name}")


def test_a_key_is_found_by_its_digest_until_its_secret_is_gone(world: World) -> None:
    world.put("chat", 1)
    assert world.owner(1) == "chat"
    assert world.owner(2) is None
    assert world.store.is_usable("chat")
    world.remove("chat")
    assert world.owner(1) is None
    assert not world.store.is_usable("chat")


@pytest.mark.promise("key-malformed")
def test_a_malformed_secret_is_refused_alone(world: World) -> None:
    world.put("chat", 1)
    world.put("broken", 2, namespaces="*")
    world.store.put((NAMESPACE, "empty"), {})
    assert world.owner(1) == "chat"
    assert world.owner(2) is None
    assert set(world.store.invalid) == {"broken", "empty"}
    assert (_gauge("keys"), _gauge("invalid_keys")) == (1, 2)
    world.put("broken", 2)
    world.remove("empty")
    assert world.owner(2) == "broken"
    assert (_gauge("keys"), _gauge("invalid_keys")) == (2, 0)


def test_a_key_that_becomes_malformed_ends(world: World) -> None:
    world.put("chat", 1)
    world.put("chat", 1, expires="soon")
    assert world.owner(1) is None
    assert not world.store.is_usable("chat")


def test_the_log_of_a_malformed_secret_shows_no_value(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.put("chat", 1, sha256=key_of(1), name=f"{key_of(1)}\n")
    shown = capsys.readouterr()
    assert "sha256" in shown.out + shown.err
    assert key_of(1) not in shown.out + shown.err


@pytest.mark.promise("key-malformed")
def test_a_digest_of_two_secrets_is_refused_in_both_until_one_is_gone(world: World) -> None:
    world.put("one", 1)
    world.put("two", 1)
    assert world.owner(1) is None
    assert not world.store.is_usable("one")
    assert not world.store.is_usable("two")
    assert (_gauge("keys"), _gauge("invalid_keys")) == (0, 2)
    world.remove("one")
    assert world.owner(1) == "two"
    assert (_gauge("keys"), _gauge("invalid_keys")) == (1, 0)


def test_a_key_that_rotates_keeps_the_digest_that_no_other_secret_has(world: World) -> None:
    both = f"{digest_of(key_of(1))},{digest_of(key_of(2))}"
    world.put("one", 1, sha256=both)
    world.put("two", 1)
    assert world.owner(1) is None
    assert world.owner(2) == "one"
    assert world.store.is_usable("one")


def test_the_old_one_of_two_digests_is_accepted_until_its_end(world: World) -> None:
    digests = [bytes.fromhex(digest_of(key_of(number))) for number in (1, 2)]
    both = ",".join(one.hex() for one in digests)
    world.put("chat", 1, sha256=both, oldUntil="2030-01-01T00:00:00Z")
    records = [world.store.find(one) for one in digests]
    accepted = [
        [record is not None and record.accepts(one, now) for now in (1893455999.0, 1893456000.0)]
        for record, one in zip(records, digests, strict=True)
    ]
    assert accepted == [[True, False], [True, True]]


def test_a_secret_that_is_being_deleted_is_revoked_though_a_finalizer_keeps_it(
    world: World,
) -> None:
    world.put("chat", 1)
    ending = key_secret("chat", key_entries(key_of(1)))
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.store.put((NAMESPACE, "chat"), ending)
    assert world.owner(1) is None
    world.remove("chat")
    assert [change for _, change, _ in world.audit.changes] == ["created", "revoked"]


def test_changes_are_recorded_with_the_last_manager(world: World) -> None:
    both = f"{digest_of(key_of(1))},{digest_of(key_of(2))}"
    world.put("chat", 1, manager="fleetkeeper-keys")
    world.put("chat", 1, manager="kubectl-edit", namespaces="team-b")
    world.put("chat", 1, manager="argocd", namespaces="team-b")  # nothing of the key changed
    world.put("chat", 1, manager="fleetkeeper-keys", namespaces="team-b", sha256=both)
    world.remove("chat")
    assert world.audit.changes == [
        ("chat", "created", "fleetkeeper-keys"),
        ("chat", "changed", "kubectl-edit"),
        ("chat", "rotated", "fleetkeeper-keys"),
        ("chat", "revoked", None),
    ]


def test_keys_of_the_first_list_are_no_changes() -> None:
    audit = RecordedAudit()
    store = KeyStore(audit)
    store.put((NAMESPACE, "chat"), key_secret("chat", key_entries(key_of(1))))
    store.listed()
    assert audit.changes == []


def test_a_key_expires_once(world: World) -> None:
    world.put("chat", 1, expires="2030-01-01T00:00:00Z")
    world.put("other", 2, expires=FUTURE)
    # A changed key has the same end again, and one that it had before.
    world.put("chat", 1, expires="2030-01-01T00:00:00Z", models="llama-*")
    world.put("chat", 1, expires=FUTURE)
    world.put("chat", 1, expires="2030-01-01T00:00:00Z")
    world.store.expire(1893455999.0)
    assert world.expired() == []
    for _ in range(2):
        world.store.expire(1893456000.0)
    assert world.store.is_expired("chat", 1893456000.0)
    assert world.expired() == ["chat"]


def test_a_key_that_ended_before_the_process_began_is_no_event(world: World) -> None:
    world.put("chat", 1, expires=PAST)
    world.store.expire(1893456000.0)
    assert world.audit.changes == [("chat", "created", None)]


def test_a_key_whose_end_was_moved_does_not_expire_at_the_old_one(world: World) -> None:
    world.put("chat", 1, expires="2030-01-01T00:00:00Z")
    world.put("chat", 1, expires=FUTURE)
    world.store.expire(1893455999.0)
    world.store.expire(1893456000.0)
    assert world.expired() == []


def test_the_name_of_the_anonymous_key_is_reserved(world: World) -> None:
    world.put("anonymous", 1)
    assert world.owner(1) is None
    assert "reserved" in world.store.invalid["anonymous"]


STEPS = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True),
    ),
    max_size=30,
)


@given(STEPS)
def test_a_digest_has_an_owner_exactly_if_one_secret_has_it(
    steps: list[tuple[str, list[int] | None]],
) -> None:
    world = World()
    model: dict[str, list[int]] = {}
    for name, numbers in steps:
        if numbers is None:
            world.remove(name)
            model.pop(name, None)
        else:
            digests = ",".join(digest_of(key_of(number)) for number in numbers)
            world.put(name, 0, sha256=digests)
            model[name] = numbers
        for number in range(4):
            owners = [one for one, held in model.items() if number in held]
            assert world.owner(number) == (owners[0] if len(owners) == 1 else None)
        usable = {one for one in "abcd" if world.store.is_usable(one)}
        assert usable == {world.owner(number) for number in range(4)} - {None}
