"""Each cause of a pod that is not ready has one reason and a sentence that says what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetkeeper.api.conditions import MESSAGE_MAX_LENGTH, Reason
from fleetkeeper.reconcile.observe.pod_problems import (
    ADVICE,
    ENGINE_CLASSES,
    EXIT_CODE_REASONS,
    engine_line,
    flapping_problem,
    needs_events,
    problem_of_creation,
    problem_of_pod,
)
from fleetkeeper.reconcile.observe.problem import say
from fleetkeeper.reconcile.types import Container, ObjectEvent, Pod, SecretUse, Termination
from tests.support.reconcile.status_cases import NO_ACCOUNT

CONTRACT = Path(__file__).parents[3] / "engine_image" / "schemas" / "exit-codes.json"
CREATED = 1_000.0
POD = Pod("chat-a", "pod-a", "chat", "engine", "rs-1", "hash", CREATED, scheduled=True)
MODEL_IMAGE = f"registry.example.com/llama@sha256:{'a' * 64}"


def with_container(**state: object) -> Pod:
    """The pod with its engine container in this state."""
    return replace(POD, containers=(Container("engine", **state),))  # type: ignore[arg-type]


def with_model_image(**state: object) -> Pod:
    """The pod with a model from an image, and its engine container in this state."""
    return replace(with_container(**state), image_volumes=(MODEL_IMAGE,))


def ended(code: int, message: str = "", reason: str = "Error", restarts: int = 1) -> Pod:
    """The pod after its engine ended."""
    end = Termination(code, reason, message, CREATED + 30)
    return with_container(waiting_reason="CrashLoopBackOff", last_terminated=end, restarts=restarts)


def beside(code: int, message: str = "", reason: str = "Error") -> Pod:
    """The pod after a container ended that the profile's podTemplate adds; its engine runs."""
    end = Termination(code, reason, message, CREATED + 30)
    added = Container("logs", last_terminated=end, restarts=1)
    return replace(POD, containers=(Container("engine", ready=True), added))


def line(death: str, message: str = "it said so") -> str:
    """A termination line as the engine writes it."""
    return json.dumps(
        {"class": death, "code": 1, "phase": "start", "message": message, "detail": ""}
    )


def unschedulable(message: str) -> Pod:
    """The pod as the scheduler refuses it."""
    return replace(POD, scheduled=False, unschedulable=message)


USES = (
    SecretUse("HF_TOKEN", "hf", "token"),
    SecretUse("HTTPS_PROXY", "proxy", "url"),
    SecretUse("HTTP_PROXY", "proxy", "plain"),
)
CAUSES: dict[str, tuple[Pod, Reason, str]] = {
    "no such image": (
        with_container(
            waiting_reason="ErrImagePull",
            waiting_message='rpc error: code = NotFound desc = failed to pull "a:b": not found',
        ),
        Reason.IMAGE_PULL,
        "imagePullSecrets",
    ),
    "image back-off": (
        with_container(
            waiting_reason="ImagePullBackOff",
            waiting_message='Back-off pulling image "a:b": ErrImagePull: rpc error: code = NotFound desc = failed to pull "a:b": not found',
        ),
        Reason.IMAGE_PULL,
        'failed to pull "a:b": not found',
    ),
    "image name that is none": (
        with_container(waiting_reason="InvalidImageName"),
        Reason.IMAGE_PULL,
        "engine profile",
    ),
    "taints": (
        unschedulable(
            "0/3 nodes are available: 3 node(s) had untolerated taint {gpu: yes}. preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
        ),
        Reason.UNSCHEDULABLE,
        "untolerated taint",
    ),
    "no processor left": (
        unschedulable("0/3 nodes are available: 3 Insufficient cpu."),
        Reason.UNSCHEDULABLE,
        "Insufficient cpu",
    ),
    "no accelerator left": (
        unschedulable(
            "0/3 nodes are available: 1 Insufficient cpu, 3 Insufficient nvidia.com/gpu."
        ),
        Reason.INSUFFICIENT_GPU,
        "nvidia.com/gpu",
    ),
    "no slice left": (
        unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/mig-3g.40gb."),
        Reason.INSUFFICIENT_GPU,
        "nvidia.com/mig-3g.40gb",
    ),
    "claim missing": (
        unschedulable('0/1 nodes are available: persistentvolumeclaim "models" not found.'),
        Reason.MISSING_VOLUME,
        "PersistentVolumeClaim models does not exist",
    ),
    "claim unbound": (
        unschedulable("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."),
        Reason.MISSING_VOLUME,
        "not bound",
    ),
    "model image not pulled": (
        with_model_image(
            waiting_reason="ImagePullBackOff",
            waiting_message=f'Back-off pulling image "{MODEL_IMAGE}": ErrImagePull: not found',
        ),
        Reason.IMAGE_PULL,
        "The image of an oci:// source cannot be pulled: not found",
    ),
    "runtime without image volumes": (
        with_model_image(
            waiting_reason="CreateContainerError",
            waiting_message='failed to generate container "c" spec: failed to generate spec: failed to mkdir "": mkdir : no such file or directory',
        ),
        Reason.IMAGE_VOLUMES_UNSUPPORTED,
        "The node cannot mount the image of an oci:// source",
    ),
    "secret missing in environment": (
        with_container(
            waiting_reason="CreateContainerConfigError", waiting_message='secret "hf" not found'
        ),
        Reason.MISSING_SECRET,
        "Secret hf does not exist",
    ),
    "secret without the key": (
        with_container(
            waiting_reason="CreateContainerConfigError",
            waiting_message="couldn't find key token in Secret team-a/hf",
        ),
        Reason.MISSING_SECRET,
        "Secret hf has no key token",
    ),
    "secret of variables": (
        replace(
            with_container(
                waiting_reason="CreateContainerConfigError",
                waiting_message='secret "proxy" not found',
            ),
            secret_uses=USES,
        ),
        Reason.MISSING_SECRET,
        "Secret proxy (variables HTTPS_PROXY, HTTP_PROXY) does not exist. Create the Secret, or correct spec.model.tokenSecret, spec.model.credentialsSecret or spec.engine.env.",
    ),
    "key of a variable": (
        replace(
            with_container(
                waiting_reason="CreateContainerConfigError",
                waiting_message="couldn't find key plain in Secret team-a/proxy",
            ),
            secret_uses=USES,
        ),
        Reason.MISSING_SECRET,
        "Secret proxy (variable HTTP_PROXY) has no key plain",
    ),
    "command missing": (
        with_container(
            waiting_reason="RunContainerError", waiting_message="exec: no such file", restarts=1
        ),
        Reason.CRASH_LOOP,
        "exec: no such file",
    ),
    "bad option": (ended(64, line("BadEngineOption")), Reason.BAD_ENGINE_OPTION, "it said so"),
    "model missing": (ended(66, line("ModelNotFound")), Reason.MODEL_NOT_FOUND, "model.source"),
    "model unreadable": (
        ended(77, line("ModelNotReadable")),
        Reason.MODEL_NOT_READABLE,
        "permissions",
    ),
    "architecture": (
        ended(69, line("UnsupportedArchitecture")),
        Reason.UNSUPPORTED_ARCHITECTURE,
        "engine.profile",
    ),
    "accelerator memory": (
        ended(72, line("CUDAOutOfMemory")),
        Reason.CUDA_OUT_OF_MEMORY,
        "maxModelLength",
    ),
    "memory by plan": (
        ended(71, line("HostOutOfMemory", "weights 14.9 GiB + base 2.1 GiB > 80% of 16 GiB")),
        Reason.HOST_OUT_OF_MEMORY,
        "weights 14.9 GiB",
    ),
    "memory by the kernel": (
        ended(137, reason="OOMKilled"),
        Reason.HOST_OUT_OF_MEMORY,
        "resources.memory",
    ),
    "killed while its line has the class Unknown": (
        ended(137, line("Unknown"), reason="OOMKilled"),
        Reason.HOST_OUT_OF_MEMORY,
        "resources.memory",
    ),
    "hung": (ended(75, line("Hung")), Reason.ENGINE_HUNG, "restarted"),
    "exit code alone": (ended(66), Reason.MODEL_NOT_FOUND, "exit code 66"),
    "unknown death": (ended(70, line("Unknown", "Boom")), Reason.CRASH_LOOP, "Boom"),
    "segmentation fault": (ended(139), Reason.CRASH_LOOP, "kubectl logs"),
    "an added container that ends as the engine does": (
        beside(72, line("CUDAOutOfMemory")),
        Reason.CRASH_LOOP,
        "Container logs terminated with exit code 72",
    ),
    "an added container that was killed for memory": (
        beside(137, reason="OOMKilled"),
        Reason.CRASH_LOOP,
        "Container logs was OOM-killed",
    ),
    "just now": (
        with_container(terminated=Termination(64, "Error", line("BadEngineOption"), CREATED)),
        Reason.BAD_ENGINE_OPTION,
        "it said so",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_its_reason_and_its_advice(cause: str) -> None:
    """The reason is the closed one, the message names pod, cause and remedy within 256 characters."""
    pod, reason, part = CAUSES[cause]
    problem = problem_of_pod(pod)
    assert problem is not None
    assert problem.reason is reason
    assert part in problem.message
    assert problem.message.startswith("Pod chat-a: ")
    assert problem.message.endswith(ADVICE[reason])
    assert len(problem.message) <= MESSAGE_MAX_LENGTH


def test_a_container_that_the_kernel_killed_is_not_explained_by_its_last_log_line() -> None:
    """It wrote no termination message: Kubernetes then returns the end of the log, which is about other things."""
    pod = ended(137, "INFO Avg prompt throughput: 7.8 tokens/s", reason="OOMKilled")
    problem = problem_of_pod(pod)
    assert problem is not None
    assert problem.reason is Reason.HOST_OUT_OF_MEMORY
    assert "OOM-killed" in problem.message
    assert "throughput" not in problem.message


def test_the_tables_are_those_of_the_engine_contract() -> None:
    """Classes and exit codes of the engine are known one by one, and no others."""
    deaths = json.loads(CONTRACT.read_text())["deaths"]
    assert {death["class"] for death in deaths} == set(ENGINE_CLASSES)
    assert {death["code"]: ENGINE_CLASSES[death["class"]] for death in deaths} == dict(
        EXIT_CODE_REASONS
    )


def test_a_mounted_secret_that_is_missing_is_found_by_its_event() -> None:
    """The pod's status is only ContainerCreating; the Warning event names the Secret."""
    pod = with_container(waiting_reason="ContainerCreating")
    text = 'MountVolume.SetUp failed for volume "token" : secret "hf" not found'
    problem = problem_of_pod(pod, [ObjectEvent("pod-a", "FailedMount", text, 2_000.0)])
    assert problem is not None
    assert problem.reason is Reason.MISSING_SECRET
    assert "Secret hf does not exist" in problem.message


def test_a_volume_that_cannot_be_mounted_is_found_by_its_event() -> None:
    """Any other failed mount is a missing volume; events of other pods do not count."""
    pod = with_container(waiting_reason="ContainerCreating")
    event = ObjectEvent("pod-a", "FailedAttachVolume", "disk is attached elsewhere", 2_000.0)
    problem = problem_of_pod(pod, [event])
    assert problem is not None
    assert problem.reason is Reason.MISSING_VOLUME
    assert problem_of_pod(pod, [replace(event, pod_uid="pod-b")]) is None


def test_a_kubelet_without_image_volumes_is_found_by_its_event() -> None:
    """It only knows that no plugin fits the volume; for a pod without images that is another cause."""
    pod = with_model_image(waiting_reason="ContainerCreating")
    text = 'failed to get Plugin from volumeSpec for volume "model-image-0" err=no volume plugin matched'
    event = ObjectEvent("pod-a", "FailedMount", text, 2_000.0)
    problem = problem_of_pod(pod, [event])
    assert problem is not None
    assert problem.reason is Reason.IMAGE_VOLUMES_UNSUPPORTED
    other = problem_of_pod(replace(pod, image_volumes=()), [event])
    assert other is not None
    assert other.reason is Reason.MISSING_VOLUME


def test_events_are_asked_for_only_while_the_pod_is_set_up_for_too_long() -> None:
    """Reading events costs a request: not for a new pod, nor for one whose engine runs."""
    setting_up = with_container(waiting_reason="ContainerCreating")
    assert not needs_events(setting_up, CREATED + 19)
    assert needs_events(setting_up, CREATED + 20)
    assert not needs_events(replace(setting_up, scheduled=False), CREATED + 60)
    assert not needs_events(with_container(), CREATED + 60)
    starting = replace(
        POD,
        containers=(
            Container("bring", init=True),
            Container("engine", waiting_reason="PodInitializing"),
        ),
    )
    assert not needs_events(starting, CREATED + 60)


def test_a_pod_that_loads_its_model_has_no_problem() -> None:
    """Running and never ended: it starts."""
    assert problem_of_pod(with_container()) is None


@pytest.mark.parametrize("pod", [pod for pod, _, _ in CAUSES.values()])
def test_a_ready_pod_has_no_problem(pod: Pod) -> None:
    """For any state before."""
    assert problem_of_pod(replace(pod, ready=True)) is None


def test_the_first_container_of_a_pod_speaks_first() -> None:
    """An init container that cannot pull is the cause, not the engine that waits for it."""
    pod = replace(
        POD,
        containers=(
            Container("engine", waiting_reason="PodInitializing"),
            Container("bring", init=True, waiting_reason="ErrImagePull", waiting_message="no such"),
        ),
    )
    problem = problem_of_pod(pod)
    assert problem is not None
    assert "container bring" in problem.message


def test_a_message_stays_while_its_cause_stays() -> None:
    """Counts of nodes, preemption and back-off times change all the time and are left out."""
    first = unschedulable(
        "0/3 nodes are available: 3 node(s) didn't match node selector. preemption: none."
    )
    later = unschedulable("0/5 nodes are available: 5 node(s) didn't match node selector.")
    assert problem_of_pod(first) == problem_of_pod(later)
    pulling, waiting = CAUSES["no such image"][0], CAUSES["image back-off"][0]
    assert problem_of_pod(pulling) == problem_of_pod(waiting)
    one, two = ended(70, restarts=1), ended(70, restarts=2)
    assert problem_of_pod(one).message == problem_of_pod(two).message  # type: ignore[union-attr]


def test_a_ready_pod_that_keeps_ending_is_noticed_for_ten_minutes() -> None:
    """Ready now, ended three times, the last a moment ago: not to be trusted."""
    end = Termination(72, "Error", line("CUDAOutOfMemory"), 5_000.0)
    pod = replace(
        POD,
        ready=True,
        containers=(Container("engine", ready=True, restarts=3, last_terminated=end),),
    )
    problem = flapping_problem(pod, 5_100.0)
    assert problem is not None
    assert problem.reason is Reason.CUDA_OUT_OF_MEMORY
    assert flapping_problem(pod, 5_601.0) is None


def test_a_missing_service_account_is_named_with_what_to_do() -> None:
    assert problem_of_creation(NO_ACCOUNT).message == (
        "ServiceAccount reader does not exist, so no pod can be created. "
        "Create the ServiceAccount or correct spec.serviceAccountName."
    )


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('pods "chat-x" is forbidden: exceeded quota: gpus, requested: 1', Reason.QUOTA_EXCEEDED),
        (
            'pods "chat-x" is forbidden: failed quota: q: must specify limits.cpu',
            Reason.QUOTA_EXCEEDED,
        ),
        (
            'pods "chat-x" is forbidden: violates PodSecurity "restricted:latest"',
            Reason.ADMISSION_DENIED,
        ),
        ('admission webhook "policy.example.com" denied the request: no', Reason.ADMISSION_DENIED),
        (
            'pods "chat-x" is forbidden: no PriorityClass with name high was found',
            Reason.ADMISSION_DENIED,
        ),
        (NO_ACCOUNT, Reason.MISSING_SERVICE_ACCOUNT),
    ],
)
def test_refused_creations_are_distinguished_without_the_generated_name(
    message: str, reason: Reason
) -> None:
    """Quota or policy; every attempt has another pod name, which would be another message."""
    problem = problem_of_creation(message)
    assert problem.reason is reason
    assert "chat-x" not in problem.message


@pytest.mark.parametrize(
    "text",
    [
        '{"class":' + "[" * 4000,
        "",
        "plain",
        "{broken",
        "[1]",
        '{"class": 3',
        '"text"',
        '{"other": 1}',
        "null\n{",
    ],
)
def test_a_termination_text_that_is_no_line_is_no_line(text: str) -> None:
    """The text comes from a container and is not to be trusted."""
    assert engine_line(text) == {}


@given(st.text(max_size=600), st.integers(-1, 300), st.text(max_size=20))
def test_no_text_of_a_container_breaks_the_diagnosis(text: str, code: int, reason: str) -> None:
    """Any text, code and reason: one of the closed reasons, at most 256 characters."""
    problem = problem_of_pod(ended(code, text, reason))
    assert problem is not None
    assert problem.reason in set(ENGINE_CLASSES.values())
    assert len(problem.message) <= MESSAGE_MAX_LENGTH


@given(st.text(max_size=300), st.text(max_size=600), st.sampled_from(list(ADVICE.values())))
def test_a_message_keeps_its_advice(what: str, detail: str, advice: str) -> None:
    """However long the cause: what to do stands at the end."""
    text = say(what[:100], detail, advice)
    assert len(text) <= MESSAGE_MAX_LENGTH
    assert text.endswith(advice)
