"""Entries of the log of decisions that the loop's tests do not bring about: pods and remedies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetkeeper.api.types import ScalingMode
from fleetkeeper.autoscale.decided import decisions_made
from fleetkeeper.autoscale.decision import ControlDecision
from fleetkeeper.autoscale.memory import ControlMemory
from fleetkeeper.autoscale.types import ControlSettings, Decision, decide
from fleetkeeper.common.values import Remedy
from tests.support.autoscale.control_cases import NOW, Loop

Pods = Decision[tuple[str, ...]]
FRAGMENTED: Pods = decide(("chat-1",), "EngineFragmented", "41% is unused")


def words(decision: ControlDecision, before: ControlMemory) -> list[str]:
    """Return the entries of a tick that changed nothing but what the decision says."""
    return [made.words for made in decisions_made(decision, before, before)]


def settled(settings: ControlSettings | None = None) -> tuple[ControlDecision, ControlMemory]:
    """Return a decision that changes nothing, and the memory after it."""
    loop = Loop(settings=settings or ControlSettings())
    decision = loop.steady(30)
    assert words(decision, loop.memory) == []
    return decision, loop.memory


def test_a_replaced_pod_is_one_entry() -> None:
    """A hung engine and a fragmented one: each with its pod and its reason."""
    decision, memory = settled()
    both = replace(decision, replacement="chat-0", restart=FRAGMENTED)
    assert words(both, memory) == [
        "restart chat-0 (EngineHung)",
        "restart chat-1 (EngineFragmented)",
    ]
    assert [made.why for made in decisions_made(both, memory, memory)] == [
        "Pod chat-0 has work but makes no progress and reports that it is hung: it is replaced",
        "41% is unused",
    ]


def test_an_advised_restart_is_no_entry() -> None:
    """In Advisory mode nothing is restarted."""
    decision, memory = settled(ControlSettings(scaling_mode=ScalingMode.ADVISORY))
    assert words(replace(decision, restart=FRAGMENTED), memory) == []


@pytest.mark.parametrize(
    ("old", "want"),
    [
        (None, "remedy 16 sequences, cap 80% (EngineOutOfMemory)"),
        (
            Remedy("EngineOutOfMemory", 32, 80, 1, 1, NOW),
            "remedy 32 sequences, cap 80% -> 16 sequences, cap 80% (EngineOutOfMemory)",
        ),
    ],
)
def test_a_step_of_a_remedy_is_one_entry(old: Remedy | None, want: str) -> None:
    """The start-up values that replace those of the spec, before and after."""
    decision, memory = settled()
    step: Decision[Remedy | None] = decide(
        Remedy("EngineOutOfMemory", 16, 80, 2, 1, NOW), "EngineOutOfMemory", "Exit 137"
    )
    assert words(replace(decision, remedy=step), replace(memory, remedy=old)) == [want]
