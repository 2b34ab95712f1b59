"""`fleetkeeper simulate`: exit codes, messages with places, and the three forms of the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fleetkeeper import cli

pytestmark = pytest.mark.slow

SERVICE = """\
apiVersion: fleetkeeper.io/v1alpha1
kind: InferenceService
metadata: {name: chat, namespace: team-a}
spec:
  model: {source: pvc://models/llama-3.1-8b}
  scaling: {minReplicas: 1, maxReplicas: 2}
"""
LOAD = ("--pattern", "constant", "--rate", "1", "--minutes", "1", "--seeds", "1")
HARDWARE = ("--hardware", "h100-8b")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "chat.yaml").write_text(SERVICE)
    (tmp_path / "t.csv").write_text("t_s,input_tokens,output_tokens\n0,100,10\n20,100,10\n")
    return tmp_path


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["simulate", "-f", "chat.yaml", *arguments])


def changed(folder: Path, more: str) -> None:
    (folder / "chat.yaml").write_text(SERVICE + more)


def test_the_report_names_each_alternative_and_the_page_is_written(folder: Path) -> None:
    done = simulate(
        *HARDWARE, *LOAD, "--against", "static:2", "--what-if", "scaling.maxReplicas=3",
        "--html", "r.html",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    for words in ("team-a/chat", "h100-8b", "static:2", "scaling.maxReplicas=3", "CONTROL"):
        assert words in done.stdout
    assert done.stderr == ""
    assert (folder / "r.html").read_text().startswith("<!DOCTYPE html>")


def test_a_batch_is_in_each_form_of_the_report(folder: Path) -> None:
    """With the tokens of the load, also of a trace; a run that ends before a deadline says so."""
    batch = ("--batch", "20k@30s", "--batch", "10k@10m,20s")
    done = simulate(*HARDWARE, *LOAD, *batch, "--against", "static:2", "--html", "r.html")
    assert done.exit_code == 0, done.output
    for text in (done.stdout, (folder / "r.html").read_text()):
        for words in ("20k@30s", "10k@10m,20s", "met", "the run ends before its deadline"):
            assert words in text
    of_trace = simulate(
        *HARDWARE, "--trace", "t.csv", "--seeds", "1", "--json", "--batch", "1k@10s"
    )
    (row,) = json.loads(of_trace.stdout)["alternatives"][0]["batch"]["batches"]
    assert (row["text"], row["deadline_s"], row["met"]) == ("1k@10s", 10.0, [True])


def test_json_is_the_only_output(folder: Path) -> None:
    done = simulate(*HARDWARE, "--trace", "t.csv", "--seeds", "1", "--json", "--ttft", "1.5")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["service"], report["seconds"], report["targets"]["ttft_s"]) == (
        "team-a/chat", 21.0, 1.5,
    )  # fmt: skip
    assert report["alternatives"][0]["figures"]["requests"]["median"] == 2
    assert report["alternatives"][0]["figures"]["slo_attainment"]["median"] == 1.0


def test_the_cheapest_fixed_fleet_is_found_unless_one_is_given_or_it_is_switched_off() -> None:
    def names(*more: str) -> list[str]:
        done = simulate(*HARDWARE, *LOAD, "--json", *more)
        assert done.exit_code == 0, done.output
        return [row["name"] for row in json.loads(done.stdout)["alternatives"]][1:]

    assert names() == ["static:1"]
    assert names("--against", "static:2") == ["static:2"]
    assert names("--against", "static:2", "--fixed-fleet") == ["static:2", "static:1"]
    assert names("--against", "static:1", "--fixed-fleet") == ["static:1"]
    assert names("--no-fixed-fleet") == []


def test_without_a_fixed_fleet_that_attains_enough_a_note_says_so() -> None:
    done = simulate(*HARDWARE, *LOAD[:2], "--rate", "200", *LOAD[4:], "--fixed-fleet")
    assert done.exit_code == 0, done.output
    assert "note: no fixed fleet up to scaling.maxReplicas (2) reaches 95%" in done.stdout
    assert "static:" not in done.stdout


def test_replicas_are_ready_at_the_start_and_decisions_have_a_reason(folder: Path) -> None:
    changed(folder, "  tiers: {standard: {queueLimit: 8}}\n")
    overload = (*LOAD[:2], "--rate", "100", "--minutes", "2", *LOAD[6:])
    done = simulate(*HARDWARE, *overload, "--json", "--no-fixed-fleet")
    ours = json.loads(done.stdout)["alternatives"][0]
    assert ours["time_line"][0]["ready"] == 1
    (change,) = [each for each in ours["decisions"] if each["subject"] == "replicas"]
    assert (change["from"], change["to"]) == ("1", "2")
    more = simulate(*HARDWARE, *LOAD, "--json", "--start", "2", "--against", "static:1,advisory")
    lines = [row["time_line"] for row in json.loads(more.stdout)["alternatives"]]
    assert [line[0]["ready"] for line in lines] == [2, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*LOAD,), ("--hardware", "h100-8b", "h200-70b")),
        ((*LOAD, "--hardware", "b300"), ("--hardware", "'b300'", "h100-8b")),
        ((*HARDWARE, *LOAD, "--against", "hpa:3"), ("--against", "'hpa:3'", "hpa-concurrency:N")),
        ((*HARDWARE, *LOAD, "--what-if", "maxReplicas"), ("--what-if", "'maxReplicas'")),
        ((*HARDWARE, *LOAD, "--fault", "fire:1"), ("--fault", "'fire:1'", "crash:SECOND")),
        ((*HARDWARE, *LOAD, "--tiers", "1,1,1"), ("--tiers", "'1,1,1'", "sum 1")),
        ((*HARDWARE, *LOAD, "--trace", "t.csv"), ("either --trace or --pattern",)),
        (HARDWARE, ("either --trace or --pattern",)),
        ((*HARDWARE, "--trace", "t.csv", "--rate", "3"), ("--rate", "needs --pattern")),
        ((*HARDWARE, *LOAD, "--scale", "2"), ("--scale", "needs --trace")),
        ((*HARDWARE, *LOAD, "--hours", "1"), ("--minutes or --hours",)),
        ((*HARDWARE, *LOAD, "--batch", "5M"), ("--batch", "'5M'", "TOKENS@WINDOW[,START]")),
        ((*HARDWARE, *LOAD, "--batch", "5M@1h,2h"), ("--batch", "'5M@1h,2h'", "(60 s)")),
        (
            (*HARDWARE, *LOAD, "--start", "3"),
            (
                "--start",
                "3 is not within scaling.minReplicas and scaling.maxReplicas;",
                "write a number from 1 to 2",
            ),
        ),
        (
            (*HARDWARE, *LOAD, "--start", "2", "--what-if", "scaling.maxReplicas=1"),
            (
                "--start",
                "with scaling.maxReplicas=1;",
                "write a number from 1 to 1",
            ),
        ),
        ((*HARDWARE, *LOAD, "--tpot", "0.005"), ("--tpot", "0.005", "shortest step")),
        ((*HARDWARE, *LOAD, "--prompt-tokens", "500000"), ("--prompt-tokens", "(400000)")),
    ],
)
def test_a_wrong_option_ends_with_2_and_is_named(
    arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = simulate(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    shown = " ".join(done.stderr.replace("│", " ").split())
    for word in words:
        assert word in shown


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("  replicas: 3\n", ("chat.yaml:7: spec.replicas: is 3", "static:3")),
        ("  engine: {tensorParallelSize: 4}\n", ("chat.yaml:4: ", "4 accelerators", "runs on 1")),
        (
            "  objectives: {batchTimeMilliseconds: 5}\n",
            ("chat.yaml:7: spec.objectives.batchTimeMilliseconds: is 5", "floor 7."),
        ),
        ("  engine: {maxModelLength: 900000}\n", ("chat.yaml:7: spec.engine.maxModelLength",)),
        ("  scalng: {}\n", ("chat.yaml:7: spec.scalng",)),
    ],
)
def test_a_service_that_does_not_fit_ends_with_64(
    folder: Path, more: str, words: tuple[str, ...]
) -> None:
    changed(folder, more)
    done = simulate(*HARDWARE, *LOAD)
    assert (done.exit_code, done.stdout) == (64, "")
    for word in words:
        assert word in done.stderr


def test_a_what_if_is_validated_and_one_without_effect_is_noted() -> None:
    done = simulate(*HARDWARE, *LOAD, "--what-if", "scaling.minReplicas=9")
    assert done.exit_code == 64
    assert done.stderr.startswith("--what-if scaling.minReplicas=9: chat.yaml:6: spec.scaling")
    done = simulate(*HARDWARE, *LOAD, "--what-if", "model.servedName=x")
    assert done.exit_code == 0, done.output
    assert "--what-if model.servedName=x: changes nothing" in done.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "t.csv: the file is empty"),
        ("t_s,input_tokens\n", "t.csv:1: column output_tokens is missing"),
        ("t_s,input_tokens,output_tokens\n0,1,x\n", "t.csv:2: output_tokens: 'x'"),
        ("t_s,input_tokens,output_tokens\n0,400000,1\n", "t.csv:2: input_tokens + output_tokens"),
    ],
)
def test_a_malformed_trace_ends_with_64(folder: Path, content: str, words: str) -> None:
    (folder / "t.csv").write_text(content)
    done = simulate(*HARDWARE, "--trace", "t.csv")
    assert (done.exit_code, done.stdout) == (64, "")
    assert done.stderr.startswith(words)


def test_files_that_cannot_be_read_end_with_66(folder: Path) -> None:
    done = simulate(*HARDWARE, "--trace", "nowhere.csv")
    assert (done.exit_code, "nowhere.csv: " in done.stderr) == (66, True)
    done = simulate("--hardware", ".", *LOAD)
    assert (done.exit_code, done.stderr.startswith(".: cannot read")) == (66, True)
    (folder / "chat.yaml").unlink()
    assert simulate(*HARDWARE, *LOAD).exit_code == 66


def test_a_hardware_file_is_read_and_checked(folder: Path) -> None:
    text = (
        "{t0_s: 0.001, w_s: 0.002, g_s: 0.00001, b_s: 0.000001, c_s: 0.0, q_s: 0.0, "
        "kv_capacity_tokens: 100000, cold_start_s: 9}"
    )
    (folder / "mine.yaml").write_text(text)
    done = simulate("--hardware", "mine.yaml", *LOAD)
    assert done.exit_code == 0, done.output
    (folder / "mine.yaml").write_text("{t0_s: 1}")
    done = simulate("--hardware", "mine.yaml", *LOAD)
    assert (done.exit_code, done.stderr.startswith("mine.yaml: ")) == (64, True)
    assert "add the field w_s" in done.stderr


def test_one_of_several_services_is_chosen(folder: Path) -> None:
    other = SERVICE.replace("name: chat", "name: other")
    (folder / "chat.yaml").write_text(f"{SERVICE}---\n{other}")
    done = simulate(*HARDWARE, *LOAD)
    assert done.exit_code == 2
    assert "team-a/other" in done.stderr
    assert simulate(*HARDWARE, *LOAD, "--service", "team-a/other").exit_code == 0
    assert simulate(*HARDWARE, *LOAD, "--service", "x/y").exit_code == 66


def test_requests_that_vllm_refuses_are_left_out_and_late_ends_are_noted(folder: Path) -> None:
    changed(folder, "  engine: {maxModelLength: 1000}\n")
    (folder / "t.csv").write_text(
        "t_s,input_tokens,output_tokens\n0,100,10\n5,2000,10\n20,100,10\n"
    )
    done = simulate(*HARDWARE, "--trace", "t.csv", "--seeds", "1", "--hours", "1")
    assert done.exit_code == 0, done.output
    assert "1 of 3 requests are longer than engine.maxModelLength (1000)" in done.stdout
    assert "t.csv ends after 21 s" in done.stdout


def test_prometheus_without_an_answer_ends_with_1() -> None:
    done = simulate("--fit-from-prometheus", "http://127.0.0.1:1", *LOAD)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "Prometheus did not answer" in done.stderr
    done = simulate("--fit-from-prometheus", "127.0.0.1", *LOAD)
    assert done.exit_code == 1
    assert "must be a URL" in done.stderr


def test_help_has_the_exit_codes_and_examples() -> None:
    text = " ".join(simulate("--help").stdout.split())
    for words in ("64", "66", "Exit codes", "Examples:", "fleetkeeper simulate -f chat.yaml"):
        assert words in text


@pytest.fixture
def second(folder: Path) -> None:
    """Another service in a file of its own."""
    (folder / "code.yaml").write_text(SERVICE.replace("name: chat", "name: code"))


TWO = ("-f", "code.yaml", "--max-accelerators", "3")
RUN = ("--minutes", "2", "--seeds", "1")


@pytest.mark.usefixtures("second")
def test_services_of_several_files_share_a_budget() -> None:
    loads = ("--load", "code=constant:300,2000,30", "--load", "t.csv")
    done = simulate(*HARDWARE, *TWO, *loads, *RUN, "--json", "--against", "hpa-waiting:1")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["max_accelerators"] == 3
    assert [row["name"] for row in report["totals"]] == ["fleetkeeper", "hpa-waiting:1"]
    chat, code = report["services"]
    assert (chat["service"], chat["load"]) == ("team-a/chat", "trace t.csv (2 requests)")
    assert code["load"].startswith("constant up to 300 requests/s, 2000 prompt and 30 output")
    # The trace is the shortest load.
    assert {each["seconds"] for each in (chat, code)} == {21.0}
    assert "the run ends after 21 s, with the shortest load" in code["notes"]
    assert [row["name"] for row in chat["alternatives"]] == [
        "fleetkeeper", "hpa-waiting:1", "static:1",
    ]  # fmt: skip


@pytest.mark.usefixtures("second")
def test_a_service_that_the_budget_limits_is_told_so() -> None:
    loads = ("--load", "chat=constant:1", "--load", "code=constant:300")
    two = ("-f", "code.yaml", "--max-accelerators", "2", "--no-fixed-fleet")
    done = simulate(*HARDWARE, *two, *loads, *RUN)
    assert done.exit_code == 0, done.output
    head, *_ = done.stdout.splitlines()
    assert head == "2 services under a budget of 2 GPUs"
    assert "allows 1 of 2 replicas, first after" in done.stdout
    assert "limited by the budget" in done.stdout


@pytest.mark.usefixtures("second")
def test_a_budget_of_the_settings_is_used(folder: Path) -> None:
    (folder / "settings.yaml").write_text("maxAcceleratorsByNamespace: {team-a: 1}\n")
    done = simulate(*HARDWARE, *LOAD, "-f", "code.yaml", "--settings", "settings.yaml")
    assert done.exit_code == 2
    shown = " ".join(done.stderr.replace("│", " ").split())
    assert "the budget of 1 GPUs for namespace team-a is less than" in shown
    assert "(team-a/chat 1, team-a/code 1)" in shown


@pytest.mark.usefixtures("second")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*LOAD, "-f", "code.yaml"), ("there are 2 services", "--max-accelerators")),
        ((*LOAD, *TWO[:3], "1"), ("--max-accelerators", "budget of 1 GPUs is less")),
        ((*LOAD, *TWO, "--start", "2"), ("--max-accelerators", "team-a/code 2", "or --start")),
        ((*TWO, "--load", "mail=day:4"), ("--load", "'mail' is not one of the services")),
        ((*TWO, "--load", "chat=day:4"), ("--load", "is missing for team-a/code")),
        ((*TWO, "--load", "dya:4"), ("--load", "'dya:4' is neither a file nor a pattern")),
        ((*TWO, *LOAD, "--load", "day:4"), ("--pattern", "cannot be used with --load")),
        ((*TWO, *LOAD, "--html", "r.html"), ("--html", "needs one service: add --service")),
        ((*TWO, *LOAD, "--batch", "1k@9s"), ("--batch", "needs one service: add --service")),
    ],
)
def test_what_several_services_lack_is_named(
    arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = simulate(*HARDWARE, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    shown = " ".join(done.stderr.replace("│", " ").split())
    for word in words:
        assert word in shown


def test_a_service_that_is_there_twice_ends_with_64() -> None:
    done = simulate(*HARDWARE, *LOAD, "-f", "chat.yaml", "--max-accelerators", "3")
    assert (done.exit_code, done.stdout) == (64, "")
    assert done.stderr.startswith("chat.yaml:3: team-a/chat is already at chat.yaml:3; remove")
