"""Arrivals are counted once, in bins of a second, and the memory for it is bounded."""

from __future__ import annotations

from fleetkeeper_contract.tiers import Tier
from fleetkeeper_engine.in_vllm.http.admission.arrivals import RETRY_MEMORY_S, Arrivals


def test_arrivals_are_counted_once_and_in_one_second_bins() -> None:
    """A retry by the same id within a minute is not a new arrival; squares are of whole bins."""
    arrivals = Arrivals()
    counted = [
        arrivals.record(Tier.STANDARD, request_id, now)
        for request_id, now in [
            (b"a", 5.1),
            (b"a", 5.2),
            (b"b", 5.9),
            (None, 6.0),
            (None, 6.1),
        ]
    ]
    assert counted == [True, False, True, True, True]
    assert arrivals.record(Tier.BATCH, b"a", 5.2 + RETRY_MEMORY_S)
    assert arrivals.total == [0, 4, 1]
    assert arrivals.squared == [0, 2**2 + 2**2, 0]


def test_the_memory_of_request_ids_is_bounded() -> None:
    """Clients cannot make the pod remember more than 65,536 ids."""
    arrivals = Arrivals()
    for number in range(70_000):
        arrivals.record(Tier.STANDARD, b"%d" % number, 1.0)
    assert len(arrivals._seen) <= 65_536
    assert arrivals.total[Tier.STANDARD] == 70_000


def test_of_a_long_request_id_the_beginning_counts() -> None:
    """A client cannot fill the pod's memory with one header: 128 bytes are kept and compared."""
    arrivals = Arrivals()
    assert arrivals.record(Tier.STANDARD, b"x" * 5000, 1.0)
    assert not arrivals.record(Tier.STANDARD, b"x" * 128 + b"another end", 2.0)
    assert {len(known) for known in arrivals._seen} == {128}
