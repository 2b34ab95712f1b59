"""The short texts of a comparison: what they mean, and what a mistake says."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from fleetkeeper.simulate.arguments import (
    Alternative,
    BadArgument,
    Batch,
    Faults,
    Kind,
    by_service,
    changed_manifest,
    parse_alternatives,
    parse_batches,
    parse_faults,
    parse_load,
    parse_tiers,
    parse_what_ifs,
)
from fleetkeeper.simulate.loads.patterns import DAY_S, Pattern, rate_of


def test_alternatives_have_a_number_and_a_token_budget() -> None:
    assert parse_alternatives("hpa-concurrency:40, hpa-waiting:0.5,static:4@512,advisory") == (
        Alternative("hpa-concurrency:40", Kind.HPA_CONCURRENCY, 40.0),
        Alternative("hpa-waiting:0.5", Kind.HPA_WAITING, 0.5),
        Alternative("static:4@512", Kind.STATIC, 4.0, 512),
        Alternative("advisory", Kind.ADVISORY),
    )
    assert parse_alternatives("") == ()


@pytest.mark.parametrize(
    "text",
    ["hpa:4", "static", "advisory:3", "static:0", "static:2.5", "hpa-waiting:-1", "hpa-waiting:nan",
     "static:x", "static:4@", "static:4@32", "static:1e9", "fleetkeeper", "static:4,static:4"],
)  # fmt: skip
def test_a_bad_alternative_is_quoted(text: str) -> None:
    with pytest.raises(BadArgument, match=text.partition(",")[0].partition("@")[0]):
        parse_alternatives(text)


def test_what_ifs_are_values_of_a_field() -> None:
    found = parse_what_ifs(["scaling.maxReplicas=8,16", "spec.scaling.mode=Advisory"])
    assert [(one.path, one.value, one.text) for one in found] == [
        (("scaling", "maxReplicas"), 8, "scaling.maxReplicas=8"),
        (("scaling", "maxReplicas"), 16, "scaling.maxReplicas=16"),
        (("scaling", "mode"), "Advisory", "scaling.mode=Advisory"),
    ]


@pytest.mark.parametrize("text", ["scaling", "=3", "a b=3", "a[0]=3", "a.b=", "a.b={"])
def test_a_bad_what_if_is_quoted(text: str) -> None:
    with pytest.raises(BadArgument) as caught:
        parse_what_ifs([text])
    assert text in str(caught.value)


def test_a_what_if_changes_a_copy_of_the_manifest() -> None:
    manifest = {"kind": "X", "spec": {"scaling": {"minReplicas": 2}, "replicas": 3}}
    (most, mode, pinned, deep) = parse_what_ifs(
        ["scaling.maxReplicas=8", "breaker.mode=Disabled", "replicas=null", "replicas.x=1"]
    )
    assert changed_manifest(manifest, most)["spec"]["scaling"] == {
        "minReplicas": 2,
        "maxReplicas": 8,
    }
    assert changed_manifest(manifest, mode)["spec"]["breaker"] == {"mode": "Disabled"}
    assert "replicas" not in changed_manifest(manifest, pinned)["spec"]
    assert manifest == {"kind": "X", "spec": {"scaling": {"minReplicas": 2}, "replicas": 3}}
    with pytest.raises(BadArgument, match="replicas has no fields"):
        changed_manifest(manifest, deep)


def test_faults_are_times_and_spans() -> None:
    faults = parse_faults(["crash:600", "metrics:900-1200", "gpus:0-10", "crash:5"])
    assert faults == Faults((5.0, 600.0), ((900.0, 1200.0),), ((0.0, 10.0),))
    assert [faults.has_metrics(now) for now in (899.0, 900.0, 1199.0, 1200.0)] == [
        True, False, False, True,
    ]  # fmt: skip
    assert not faults.has_gpus(0.0)


@pytest.mark.parametrize(
    "text", ["crash", "crash:1-2", "metrics:5", "metrics:9-9", "gpus:5-1", "disk:5", "crash:nan"]
)
def test_a_bad_fault_is_quoted(text: str) -> None:
    with pytest.raises(BadArgument, match=text):
        parse_faults([text])


@pytest.mark.parametrize("text", ["1", "0.5,0.5", "0.5,0.5,0.5", "2,-1,0", "a,b,c", "nan,0,1"])
def test_tiers_are_three_shares(text: str) -> None:
    assert parse_tiers("0.2,0.6,0.2") == (0.2, 0.6, 0.2)
    with pytest.raises(BadArgument, match=text):
        parse_tiers(text)


@pytest.mark.parametrize(
    ("pattern", "seconds", "at"),
    [
        (Pattern.CONSTANT, 60.0, {0.0: 1.0, 59.0: 1.0}),
        (Pattern.STEP, 90.0, {29.0: 0.5, 30.0: 1.0, 59.0: 1.0, 60.0: 0.5}),
        (Pattern.RAMP, 90.0, {0.0: 0.1, 30.0: 0.55, 60.0: 1.0, 75.0: 0.55}),
        (Pattern.BURST, 1200.0, {0.0: 1 / 3, 240.0: 1.0, 299.0: 1.0, 300.0: 1 / 3, 850.0: 1.0}),
        (Pattern.DAY, DAY_S, {2 * 3600.0: 0.2, 14 * 3600.0: 1.0}),
    ],
)
def test_the_rate_of_a_pattern_is_its_highest(
    pattern: Pattern, seconds: float, at: dict[float, float]
) -> None:
    rate: Callable[[float], float] = rate_of(pattern, 10.0, seconds)
    assert {now: rate(now) for now in at} == pytest.approx(
        {now: 10 * ratio for now, ratio in at.items()}
    )
    assert max(rate(seconds * step / 997) for step in range(997)) <= 10.0 + 1e-9
    assert pattern.text


def test_batches_have_tokens_a_window_and_a_start() -> None:
    assert parse_batches(["5M@6h,2h", "500k@90m", " 1.5G@1d,30s"]) == (
        Batch(5e6, 21_600.0, 7200.0, "5M@6h,2h"),
        Batch(5e5, 5400.0, 0.0, "500k@90m"),
        Batch(1.5e9, 86_400.0, 30.0, " 1.5G@1d,30s"),
    )
    assert parse_batches(["5M@6h,2h"])[0].deadline_s == 8 * 3600.0


@pytest.mark.parametrize(
    "text",
    ["", "5M", "5M@", "@6h", "5M@6", "5M@6h,", "5M@6h,2", "-5M@6h", "5M@0h", "0@6h", "nan@6h", "20G@6h",
     "5M@-6h", "5M@6h,2h,3h", "5X@6h"],
)  # fmt: skip
def test_a_bad_batch_is_quoted(text: str) -> None:
    with pytest.raises(BadArgument, match=re.escape(repr(text))):
        parse_batches([text])


def test_a_load_is_a_pattern_or_a_file() -> None:
    assert parse_load("day") == (Pattern.DAY, [None, None, None])
    assert parse_load("day:40") == (Pattern.DAY, [40.0, None, None])
    assert parse_load("burst:20,2050,30") == (Pattern.BURST, [20.0, 2050.0, 30.0])
    assert parse_load("monday.csv.gz") is None
    assert parse_load("days:40") is None


@pytest.mark.parametrize("text", ["day:", "day:x", "day:-1", "day:1,2", "day:1,2,3,4", "day:1e9"])
def test_a_bad_load_is_quoted(text: str) -> None:
    with pytest.raises(BadArgument, match=text):
        parse_load(text)


SERVICES = ("a/chat", "a/code", "b/code")


def test_a_text_is_for_one_service_or_for_all_others() -> None:
    assert by_service([], SERVICES) == {}
    assert by_service(["x"], SERVICES) == dict.fromkeys(SERVICES, "x")
    assert by_service(["chat=x", "b/code=y=1", "z"], SERVICES) == {
        "a/chat": "x", "a/code": "z", "b/code": "y=1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["mail=x"], ("'mail=x'", "'mail' is not one of", "a/chat, a/code, b/code")),
        (["code=x"], ("'code=x'", "not only one", "a/code, b/code")),
        (["chat=x", "a/chat=y"], ("'a/chat=y'", "a/chat has one already")),
        (["x", "y"], ("'y'", "has one already")),
        (["chat=x", "a/code=x"], ("missing for b/code", "b/code=")),
    ],
)
def test_a_text_for_an_unknown_service_or_a_service_without_one_is_named(
    texts: list[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(BadArgument) as caught:
        by_service(texts, SERVICES)
    for word in words:
        assert word in str(caught.value)
