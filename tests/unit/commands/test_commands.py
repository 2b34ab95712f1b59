"""The command line: what each command prints, on which line a mistake is, how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from fleetkeeper import cli
from fleetkeeper.api.schema.crd import crd_text
from fleetkeeper.commands.service.needs import needs_of
from fleetkeeper.commands.service.service_files import UnreadableFile, read_documents
from fleetkeeper.exit_codes import MEANING, ExitCode
from fleetkeeper.reconcile.context import default_context

GOOD = """\
apiVersion: fleetkeeper.io/v1alpha1
kind: InferenceService
metadata:
  name: chat
  namespace: team-a
spec:
  model:
    source: pvc://models/llama-3.1-8b
  scaling: {minReplicas: 2, maxReplicas: 6}
  engine:
    tensorParallelSize: 4
  resources:
    cpu: 7500m
    memory: 64Gi
"""
BAD = """\
# a comment moves the lines
apiVersion: fleetkeeper.io/v1alpha1
kind: InferenceService
metadata:
  name: chat
spec:
  model:
    source: hf://meta/llama
  scalng: {}
  scaling:
    minReplicas: 12
  engine:
    dtype: half
    options:
      trust-remote-code: "true"
  placement:
    tolerations:
      - {key: a, operator: Exists}
      - {value: x}
  resources: {cpu: 0.5}
  breaker: {fallbackReplicas: 9}
  memory: {capPercent: 90}
  serviceAccountName: reader
  batching:
    maxTokens: 8192
    minTokens: 9000
    minSequences: many
"""
BAD_LINES = {
    7: "spec.model.revision",
    9: "spec.scalng",
    10: "spec.scaling.maxReplicas",
    13: "spec.engine.dtype",
    15: "spec.engine.options.trust-remote-code",
    19: "spec.placement.tolerations[1].key",
    20: "spec.resources.cpu",
    21: "spec.breaker",
    22: "spec.memory.capPercent",
    23: "spec.serviceAccountName",
    25: "spec.batching.maxTokens",
    27: "spec.batching.minSequences",
}


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def invoked(*words: str, stdin: str | None = None, **files: str) -> Result:
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        return CliRunner().invoke(cli.app, list(words), input=stdin)

    return invoked


def test_render_prints_every_child_in_order_and_names_no_owner_without_a_uid(run: Run) -> None:
    """An owner reference with a made-up UID would have the children collected at once."""
    done = run("render", "-f", "good.yaml", good=GOOD)
    assert done.exit_code == 0
    children = list(yaml.safe_load_all(done.stdout))
    assert [(child["kind"], child["metadata"]["name"]) for child in children] == [
        ("ConfigMap", "chat-fk-control"),
        ("NetworkPolicy", "chat-fk-engine"),
        ("PodDisruptionBudget", "chat-fk-engine"),
        ("Deployment", "chat"),
        ("NetworkPolicy", "chat-fk-router"),
        ("Deployment", "chat-fk-router"),
        ("Service", "chat-fk-engines"),
        ("PodDisruptionBudget", "chat-fk-router"),
        ("Service", "chat"),
    ]
    assert {child["metadata"]["namespace"] for child in children} == {"team-a"}
    assert all("ownerReferences" not in child["metadata"] for child in children)
    assert "&id" not in done.stdout
    engine = next(
        c for c in children if c["kind"] == "Deployment" and c["metadata"]["name"] == "chat"
    )
    assert engine["spec"]["replicas"] == 2


def test_render_takes_replicas_namespace_and_standard_input(run: Run) -> None:
    text = GOOD.replace("  namespace: team-a\n", "")
    done = run("render", "-f", "-", "--replicas", "5", "-n", "elsewhere", stdin=text)
    children = list(yaml.safe_load_all(done.stdout))
    assert children[3]["spec"]["replicas"] == 5
    assert {child["metadata"]["namespace"] for child in children} == {"elsewhere"}


def test_render_of_a_live_service_keeps_its_owner_and_its_profile(run: Run) -> None:
    live = yaml.safe_load(GOOD)
    live["metadata"]["uid"] = "8f3c"
    live["spec"]["engine"]["profile"] = "cuda"
    live["status"] = {"engine": {"requested": "cuda", "profile": "cuda-0.31.0-1"}}
    done = run("render", "-f", "live.yaml", live=json.dumps(live))
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "spec.engine.profile" in done.stderr
    assert "'cuda-0.31.0-1'" in done.stderr
    del live["status"]
    done = run("render", "-f", "live.yaml", live=json.dumps(live))
    owners = [c["metadata"]["ownerReferences"][0]["uid"] for c in yaml.safe_load_all(done.stdout)]
    assert set(owners) == {"8f3c"}


@pytest.mark.promise("check-explains")
@pytest.mark.parametrize("command", ["render", "check"])
def test_every_mistake_is_reported_with_file_line_and_field(run: Run, command: str) -> None:
    done = run(command, "-f", "bad.yaml", bad=BAD)
    assert done.exit_code == 64
    output = done.stderr if command == "render" else done.stdout
    places = [line.split(": ")[:2] for line in output.splitlines() if line.startswith("bad.yaml")]
    assert places == [[f"bad.yaml:{line}", path] for line, path in BAD_LINES.items()]
    if command == "render":
        assert done.stdout == ""


@pytest.mark.parametrize("profile", ["cuda", "rocm"])
def test_an_error_that_depends_on_a_broken_field_is_not_reported(run: Run, profile: str) -> None:
    """A default in its place would break rules that the user's value may keep."""
    text = f"""\
apiVersion: fleetkeeper.io/v1alpha1
kind: InferenceService
metadata: {{name: chat}}
spec:
  model:
    source: 3
    revision: main
    adapters:
      - {{name: "a b", source: pvc://m/a}}
      - {{name: sql, source: hf://a/sql}}
      - {{name: sql, source: hf://a/sql, revision: main}}
  scaling: {{mode: External, minReplicas: 12, maxReplicas: many}}
  resources: {{memory: 1 Gi, sharedMemory: 40Gi}}
  engine: {{profile: {profile}, options: {{host: x, seed: 7, max-loras: "8", max-cpu-loras: "2"}}}}
"""
    done = run("check", "-f", "bad.yaml", bad=text)
    found = [line.split(": ")[1] for line in done.stdout.splitlines()]
    unknown = ["spec.engine.profile"] if profile == "rocm" else []
    assert sorted(found) == sorted([
        "spec.model.source",
        "spec.model.adapters[0].name",
        "spec.model.adapters[1].revision",
        "spec.model.adapters[2].revision",
        "spec.scaling.maxReplicas",
        "spec.replicas",
        "spec.resources.memory",
        "spec.engine.options.host",
        "spec.engine.options.seed",
        *unknown,
    ])  # fmt: skip


def test_a_duplicate_key_is_reported_with_both_lines(run: Run) -> None:
    text = GOOD + "  scaling:\n    maxReplicas: 1\n"
    done = run("check", "-f", "twice.yaml", twice=text)
    assert done.exit_code == 64
    assert "twice.yaml:15: spec.scaling: " in done.stdout
    assert "line 9" in done.stdout


@pytest.mark.promise("check-explains")
def test_check_shows_what_a_service_needs(run: Run) -> None:
    done = run("check", "-f", "good.yaml", good=GOOD)
    assert done.exit_code == 0, done.output
    for words in (
        "good.yaml:1: team-a/chat: OK",
        "vLLM 0.32.0, profile cuda-0.32.0-1",
        "2 to 6",
        "6 x 4 = 24 nvidia.com/gpu at most",
        " 4 more ",
        "rollout.maxSurge",
        "6 x 7.5 = 45 at most",
        "6 x 64.0 GiB = 384.0 GiB at most",
        "80% of each accelerator's memory",
    ):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("surge", "more"), [("25%", " 8 more "), ("1%", " 4 more "), ("2", " 8 more ")]
)
def test_check_counts_a_surge_in_percent_of_the_most_replicas(
    run: Run, surge: str, more: str
) -> None:
    """6 replicas of 4 GPUs: 25% is 1.5 replicas, rounded up to 2."""
    done = run("check", "-f", "good.yaml", good=f"{GOOD}  rollout: {{maxSurge: {surge}}}\n")
    assert done.exit_code == 0, done.output
    assert more in done.stdout
    assert f"rollout.maxSurge is {surge}" in done.stdout


def test_render_shows_a_suspended_service_without_replicas(run: Run) -> None:
    done = run("render", "-f", "good.yaml", good=GOOD + "  suspend: true\n")
    engine = next(
        child
        for child in yaml.safe_load_all(done.stdout)
        if (child["kind"], child["metadata"]["name"]) == ("Deployment", "chat")
    )
    assert engine["spec"]["replicas"] == 0


EXPOSED = "  service: {type: LoadBalancer}\n"


def test_check_refuses_a_service_outside_the_cluster_by_default(run: Run) -> None:
    done = run("check", "-f", "good.yaml", good=GOOD + EXPOSED)
    assert done.exit_code == 64
    assert "spec.service.type: LoadBalancer is not allowed" in done.stdout
    assert "exposedServiceTypes" in done.stdout


def test_check_says_that_nobody_outside_can_connect_yet(run: Run) -> None:
    """A load balancer without an address range in the policy is closed where policies are enforced."""
    settings = "exposedServiceTypes: [LoadBalancer]\n"
    arguments = ("check", "-f", "good.yaml", "--settings", "s.yaml")
    done = run(*arguments, good=GOOD + EXPOSED, s=settings)
    assert done.exit_code == 0, done.output
    assert "networkPolicy.cidrs is empty" in done.stdout
    opened = f"{GOOD}{EXPOSED}  networkPolicy: {{cidrs: [{{cidr: 192.0.2.0/24}}]}}\n"
    assert "cidrs" not in run(*arguments, good=opened, s=settings).stdout


def test_render_writes_percentages_as_they_are(run: Run) -> None:
    """The Deployment controller and the eviction API count them anew for each number of replicas."""
    change = (
        "  rollout: {maxSurge: 25%, maxUnavailable: 10%}\n  disruption: {maxUnavailable: 50%}\n"
    )
    done = run("render", "-f", "good.yaml", good=GOOD + change)
    assert done.exit_code == 0, done.output
    for words in ("maxSurge: 25%", "maxUnavailable: 10%", "maxUnavailable: 50%"):
        assert words in done.stdout


def test_check_does_the_memory_arithmetic_of_a_cpu_service(run: Run) -> None:
    text = GOOD.replace("    tensorParallelSize: 4\n", "    profile: cpu\n")
    done = run("check", "-f", "cpu.yaml", cpu=text)
    assert "80% x 64.0 GiB = 51.2 GiB in each replica" in done.stdout
    assert "accelerators" not in done.stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("  disruption: {maxUnavailable: 0}\n", "disruption.maxUnavailable is 0"),
        ("  disruption: {maxUnavailable: 0%}\n", "disruption.maxUnavailable is 0"),
        ("  access: Gateway\n", "access is Gateway"),
        ("  routing: {replicas: 1}\n", "routing.replicas is 1"),
        ("  routing: {resources: {memory: 64Mi}}\n", "routing.resources.memory is 64Mi"),
        ("  replicas: 3\n", "replicas is 3"),
        ("  replicas: 0\n", "0 (stopped)"),
        ("  suspend: true\n", "suspend is true"),
    ],
)
def test_check_warns_of_surprises(run: Run, change: str, words: str) -> None:
    done = run("check", "-f", "good.yaml", good=GOOD + change)
    assert done.exit_code == 0
    assert words in done.stdout


@pytest.mark.parametrize(
    ("scaling", "rest", "words"),
    [
        ("sleep: {}", "", "access is Open, and only the gateway wakes a service"),
        ("sleep: {}, mode: Advisory", "  access: Gateway\n", "scaling.mode is Advisory; set"),
        ("sleep: {}", "  access: Gateway\n  replicas: 2\n", "replicas is 2; remove it"),
        ("sleep: {}", "  access: Gateway\n", ""),
        ("mode: Advisory", "", ""),
    ],
)
def test_check_says_why_a_service_never_sleeps(
    run: Run, scaling: str, rest: str, words: str
) -> None:
    text = GOOD.replace("maxReplicas: 6", f"maxReplicas: 6, {scaling}") + rest
    done = run("check", "-f", "good.yaml", good=text)
    assert done.exit_code == 0, done.output
    found = [line for line in done.stdout.splitlines() if "never goes to sleep" in line]
    assert [words in line for line in found] == ([True] if words else [])


ONE_GPU = GOOD.replace("tensorParallelSize: 4", "tensorParallelSize: 1")
WITH_ONE = ONE_GPU.replace("maxReplicas: 6", "maxReplicas: 1").replace(
    "minReplicas: 2", "minReplicas: 1"
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{GOOD}  rollout: {{strategy: Surge}}\n", "without 4 free accelerators, a rollout waits"),
        (WITH_ONE, "with one replica, a rollout waits for 1 free accelerator"),
        (WITH_ONE, "Swap holds them and needs access: Gateway"),
        (f"{WITH_ONE}  access: Gateway\n", "set rollout.strategy to Swap: the gateway holds requests while the replica is replaced"),
        (f"{WITH_ONE}  rollout: {{strategy: Surge}}\n", "rollout.strategy is Surge, and there is one replica: without 1 free accelerator, a rollout fails after 10 minutes"),
        (f"{WITH_ONE}  rollout: {{strategy: Replace}}\n", "rollout.strategy is Replace, and there is one replica: requests fail while it is replaced"),
        (GOOD.replace("Size: 4", "Size: 16"), "16 accelerators on one node"),
        (f"{ONE_GPU}    accelerator: {{resource: amd.com/gpu}}\n", "amd.com/gpu, but the engine profile cuda-0.32.0-1 runs only on NVIDIA GPUs"),
        (f"{ONE_GPU}    accelerator: {{resource: nvidia.com/gpu.shared}}\n", "nvidia.com/gpu.shared is a device that several pods share"),
        (f"{ONE_GPU}    claims: [{{name: gpu, resourceClaimName: one}}]\n", "all replicas share the devices"),
        (GOOD.replace("  engine:\n", '  engine:\n    options: {enable-chunked-prefill: "false"}\n'), "engine.maxModelLength is not set"),
    ],
)  # fmt: skip
def test_check_warns_of_what_few_clusters_can_give(run: Run, text: str, words: str) -> None:
    done = run("check", "-f", "x.yaml", x=text)
    assert done.exit_code == 0, done.output
    assert words in done.stdout


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"{WITH_ONE}  access: Gateway\n  networkPolicy: {{preset: Gateway}}\n  rollout: {{strategy: Swap}}\n",
        GOOD.replace("Size: 4", "Size: 8"),
        f"{ONE_GPU}    accelerator: {{resource: nvidia.com/mig-3g.40gb}}\n",
        f"{ONE_GPU}    claims: [{{name: gpu, resourceClaimTemplateName: one}}]\n",
        f"{ONE_GPU}    accelerator: {{}}\n    claims: [{{name: nic, resourceClaimName: nic}}]\n",
        ONE_GPU.replace("  engine:\n", '  engine:\n    maxModelLength: 8192\n    options: {enable-chunked-prefill: "false"}\n'),
        f"{ONE_GPU.replace('    tensorParallelSize: 1', '    profile: cpu')}  rollout: {{strategy: Surge}}\n",
    ],
)  # fmt: skip
def test_check_has_no_note_where_there_is_no_surprise(run: Run, text: str) -> None:
    done = run("check", "-f", "x.yaml", x=text)
    assert done.exit_code == 0, done.output
    notes = [line for line in done.stdout.splitlines() if line.startswith("  note")]
    assert all("minReplicas is 1" in note for note in notes), notes


OLDER = """\
aliases: {cuda: cuda-0.30.0-1}
profiles:
  - {name: cuda-0.30.0-1, accelerator: cuda, vllmVersion: 0.30.0, delivery: baked, image: example.invalid/vllm:1}
"""


@pytest.mark.parametrize(
    ("change", "is_reached"),
    [("", False), (", egress: [{cidr: 0.0.0.0/0}]", True), (", variables: {TIKTOKEN_ENCODINGS_BASE: /encodings}", True)],
)  # fmt: skip
def test_check_says_that_an_older_gpt_oss_has_to_read_its_encoding(
    run: Run, change: str, is_reached: bool
) -> None:
    """From vLLM 0.31 on, the library contains the encoding."""
    text = ONE_GPU.replace("pvc://models/llama-3.1-8b", "pvc://models/gpt-oss-20b")
    words = "gpt-oss models read their encoding from openaipublic"
    profiles = OLDER.replace("vllm:1}", f"vllm:1{change}}}")
    arguments = ("check", "-f", "x.yaml", "--settings", "s.yaml")
    done = run(*arguments, x=text, s="profilesFile: p.yaml\n", p=profiles)
    assert done.exit_code == 0, done.output
    assert (words in done.stdout) is not is_reached
    assert words not in run("check", "-f", "x.yaml", x=text).stdout
    hub = text.replace(
        "pvc://models/gpt-oss-20b", f"hf://openai/gpt-oss-20b\n    revision: {'a' * 40}"
    )
    assert words not in run(*arguments, x=hub, p=OLDER).stdout


KSERVE = """\
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: llama}
spec: {predictor: {model: {modelFormat: {name: huggingface}, storageUri: "hf://a/b"}}}
"""


def test_a_file_of_kserve_is_named_as_such(run: Run) -> None:
    alone = run("check", "-f", "kserve.yaml", kserve=KSERVE)
    assert alone.exit_code == 66
    assert "kserve.yaml:1: InferenceService llama is an object of KServe" in alone.stderr
    assert "fleetkeeper.io/v1alpha1" in alone.stderr
    beside = run("check", "-f", "both.yaml", both=f"{KSERVE}---\n{GOOD}")
    assert beside.exit_code == 0
    assert "both.yaml:1: InferenceService llama is an object of KServe" in beside.stdout
    other = run(
        "check", "-f", "other.yaml", other=GOOD.replace("fleetkeeper.io/", "fleetkeeper.com/")
    )
    assert "is of fleetkeeper.com, not of fleetkeeper.io" in other.stderr


def test_check_says_what_a_cluster_needs_for_a_model_in_an_image(run: Run) -> None:
    source = f"oci://registry.example.com/llama@sha256:{'a' * 64}"
    done = run("check", "-f", "good.yaml", good=GOOD.replace("pvc://models/llama-3.1-8b", source))
    assert done.exit_code == 0
    assert "Kubernetes 1.35" in done.stdout
    assert "containerd 2.1" in done.stdout
    assert "image volumes" not in run("check", "-f", "good.yaml", good=GOOD).stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "    env: [{name: OMP_STACKSIZE, value: 1G}]\n",
            ("spec.engine.env[0].name: OMP_STACKSIZE", "engine profile"),
        ),
        ("    profile: rocm\n", ("'rocm'", "cpu, cpu-0.32.0-1, cuda")),
        ("    profile: cpu\n", ("spec.engine.tensorParallelSize: must be 1", "cpu-0.32.0-1")),
    ],
)
def test_what_the_profile_does_not_support_is_reported(
    run: Run, change: str, words: tuple[str, ...]
) -> None:
    text = GOOD.replace("    tensorParallelSize: 4\n", f"    tensorParallelSize: 4\n{change}")
    done = run("check", "-f", "x.yaml", x=text)
    assert done.exit_code == 64
    for word in words:
        assert word in done.stdout


def test_check_counts_the_accelerators_of_claims(run: Run) -> None:
    claims = "    claims: [{name: gpus, resourceClaimTemplateName: four-gpus}]\n"
    done = run("check", "-f", "claims.yaml", claims=GOOD + claims)
    assert done.exit_code == 0, done.output
    assert "6 x 4 = 24 from resources.claims at most" in done.stdout


def test_settings_bring_other_profiles_and_allow_floating_revisions(
    run: Run, tmp_path: Path
) -> None:
    text = GOOD.replace("pvc://models/llama-3.1-8b", "hf://a/b\n    revision: main")
    assert run("check", "-f", "hf.yaml", hf=text).exit_code == 64
    done = run("check", "-f", "hf.yaml", "--settings", "s.yaml", s="floatingRevisions: true\n")
    assert done.exit_code == 0, done.output
    assert "model.cache" in done.stdout
    done = run("check", "-f", "hf.yaml", "--settings", "s.yaml", s="floatingRevision: true\n")
    assert done.exit_code == 64
    assert "floatingRevision" in done.stderr


def test_other_objects_are_named_and_skipped_and_lists_are_opened(run: Run) -> None:
    inside = "".join(f"  {line}\n" for line in GOOD.splitlines()).replace(
        "  apiVersion", "- apiVersion", 1
    )
    text = f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: x}}\n---\napiVersion: v1\nkind: List\nitems:\n{inside}"
    done = run("check", "-f", "many.yaml", many=text)
    assert done.exit_code == 0, done.output
    assert "many.yaml:1: ConfigMap x is not an InferenceService: skipped" in done.stdout
    assert "many.yaml:8: team-a/chat: OK" in done.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\n", "x.yaml:2: "),
        ("- 1\n", "x.yaml:1: "),
        ("", "no InferenceService"),
        ("kind: Pod\n", "no InferenceService"),
    ],
)
def test_a_file_that_is_no_manifest_is_reported_and_ends_with_66(
    run: Run, text: str, words: str
) -> None:
    done = run("render", "-f", "x.yaml", x=text)
    assert (done.exit_code, done.stdout) == (66, "")
    assert words in done.stderr


def test_a_missing_file_is_reported_and_ends_with_66(run: Run) -> None:
    done = run("check", "-f", "nowhere.yaml")
    assert done.exit_code == 66
    assert "nowhere.yaml: " in done.stderr
    assert "No such file or directory" in done.stderr


def test_a_file_that_is_no_text_is_reported(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnreadableFile, match="UTF-8"):
        read_documents(str(tmp_path / "b.yaml"))


def test_dates_and_numbers_in_names_stay_what_they_were(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text(GOOD.replace("name: chat", "name: 2026-01-01"))
    (document,) = read_documents(str(tmp_path / "d.yaml"))
    assert document.manifest["metadata"]["name"] == "2026-01-01"


def test_crds_prints_the_generated_file(run: Run) -> None:
    assert run("crds").stdout == crd_text()


def test_version_names_what_it_works_with(run: Run) -> None:
    assert "engine contract 1, vLLM 0.31.0, 0.32.0" in run("version").stdout


def test_wrong_use_ends_with_2_and_help_tells_the_exit_codes_and_examples(run: Run) -> None:
    assert run("render").exit_code == ExitCode.USAGE
    assert run("frobnicate").exit_code == ExitCode.USAGE
    text = " ".join(run("--help").stdout.split())
    for code, meaning in MEANING.items():
        assert f"{code.value} {meaning}" in text
    for command in ("render", "check", "crds", "run"):
        assert f"fleetkeeper {command}" in run(command, "--help").stdout.partition("Examples:")[2]


def test_completion_is_offered(run: Run) -> None:
    assert "--install-completion" in run("--help").stdout


def test_without_fleetkeeper_local_the_command_says_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fleetkeeper_local.cli", None)
    done = run("local", "up", "--dir", "x")
    assert done.exit_code == ExitCode.NOT_INSTALLED
    assert "pip install fleetkeeper-local" in done.stderr
    assert "(not installed)" in run("--help").stdout


def test_run_reports_bad_settings_before_anything_starts(run: Run) -> None:
    done = run("run", "--config", "s.yaml", s="logLevel: loud\n")
    assert done.exit_code == 64
    assert "logLevel" in done.stderr or "log_level" in done.stderr


def test_needs_of_a_replace_rollout_have_no_surge(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(GOOD + "  rollout: {strategy: Replace}\n")
    (document,) = read_documents(str(tmp_path / "r.yaml"))
    service = document.service(allow_floating_revisions=False)
    needs = needs_of(service, default_context().catalog.resolve("cuda"))
    assert (needs.surge, needs.accelerators(6)) == (0, 24)
