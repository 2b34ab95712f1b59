"""The problem of a pod that is not ready: a reason from a closed set, and a message with a remedy.

The sources, from the most to the least reliable: the scheduler's verdict, the kubelet's waiting
reason, its Warning events, the engine's own termination line (one JSON object, see
engine_image/schemas/exit-codes.json), its exit code. A ready pod has no problem.

Messages contain nothing that changes while the cause stays the same (no counts, no back-off times),
because every changed message is a write of the status.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping

from fleetkeeper.api.conditions import Reason
from fleetkeeper.api.names import ENGINE_CONTAINER, INSTALL_CONTAINER, Component
from fleetkeeper.reconcile.observe.problem import Problem, say
from fleetkeeper.reconcile.types import Container, ObjectEvent, Pod, Termination
from fleetkeeper_contract.exit_codes import EXIT_CODES, DeathClass

IMAGE_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
CONFIG_REASONS = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"}
)
FLAPPING_S = 600.0
"""A container that terminated three times counts as unstable for this time after the last one."""
SET_UP_S = 20.0
"""The usual maximum for the setup of a pod's volumes and sandbox. After it, events are read."""
VOLUME_EVENTS = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})

OWN_CONTAINERS = frozenset({ENGINE_CONTAINER, INSTALL_CONTAINER})
"""The containers of an engine pod that Fleetkeeper makes."""

ENGINE_CLASSES: Mapping[str, Reason] = {
    DeathClass.BAD_ENGINE_OPTION: Reason.BAD_ENGINE_OPTION,
    DeathClass.MODEL_NOT_FOUND: Reason.MODEL_NOT_FOUND,
    DeathClass.UNSUPPORTED_ARCHITECTURE: Reason.UNSUPPORTED_ARCHITECTURE,
    DeathClass.HOST_OUT_OF_MEMORY: Reason.HOST_OUT_OF_MEMORY,
    DeathClass.CUDA_OUT_OF_MEMORY: Reason.CUDA_OUT_OF_MEMORY,
    DeathClass.HUNG: Reason.ENGINE_HUNG,
    DeathClass.MODEL_NOT_READABLE: Reason.MODEL_NOT_READABLE,
    DeathClass.UNKNOWN: Reason.CRASH_LOOP,
}
"""The reasons for the classes of the engine's termination line."""

EXIT_CODE_REASONS: Mapping[int, Reason] = {
    EXIT_CODES[DeathClass(death)]: reason for death, reason in ENGINE_CLASSES.items()
}
"""The reasons for the engine's exit codes, used if it could not write its termination line."""

ADVICE: Mapping[Reason, str] = {
    Reason.IMAGE_PULL: "Check the image of the engine profile, an oci:// source, and spec.imagePullSecrets.",
    Reason.UNSCHEDULABLE: "Add nodes, or change spec.resources or spec.placement.",
    Reason.INSUFFICIENT_GPU: "Add accelerator nodes, free accelerators, or lower spec.resources.accelerator.count or the replicas.",
    Reason.MODEL_NOT_FOUND: "Check spec.model.source and spec.model.revision.",
    Reason.MODEL_NOT_READABLE: "Check the permissions of the model files, spec.model.tokenSecret of a gated model, or spec.model.credentialsSecret of an s3:// model.",
    Reason.BAD_ENGINE_OPTION: "Change spec.engine or the engine profile.",
    Reason.UNSUPPORTED_ARCHITECTURE: "Choose a newer spec.engine.profile, or another model.",
    Reason.CUDA_OUT_OF_MEMORY: "Lower spec.engine.maxModelLength or spec.batching.maxSequences, quantize the model, or request more accelerators.",
    Reason.HOST_OUT_OF_MEMORY: "Raise spec.resources.memory, or lower spec.engine.maxModelLength.",
    Reason.ENGINE_HUNG: "The container is restarted. If this repeats, read the pod's log and try another engine profile.",
    Reason.CRASH_LOOP: "Read the container's log: kubectl logs --previous.",
    Reason.QUOTA_EXCEEDED: "Raise the namespace's ResourceQuota or request less.",
    Reason.ADMISSION_DENIED: "Change the spec or the cluster's policy.",
    Reason.MISSING_SECRET: "Create the Secret, or correct spec.model.tokenSecret, spec.model.credentialsSecret or spec.engine.env.",
    Reason.MISSING_SERVICE_ACCOUNT: "Create the ServiceAccount or correct spec.serviceAccountName.",
    Reason.MISSING_VOLUME: "Create the PersistentVolumeClaim or correct spec.model.",
    Reason.IMAGE_VOLUMES_UNSUPPORTED: "Use Kubernetes 1.35 (or 1.33 with the feature gate ImageVolume) and containerd 2.1 or CRI-O 1.31, or a pvc:// or hf:// source.",
}
"""The remedy at the end of every message."""

NO_IMAGE_VOLUMES = ('failed to mkdir ""', "no volume plugin matched", "must specify a volume type")
"""The messages of those that do not know image volumes: containerd before 2.1, the kubelet, and the
API server, which drops the unknown volume type."""

_EXTENDED_RESOURCE = re.compile(r"Insufficient ([a-z0-9.-]+/[A-Za-z0-9._-]+)")
_NOT_ACCELERATORS = ("ephemeral-storage", "hugepages-", "attachable-volumes-")
_CLAIM = re.compile(r"persistentvolumeclaim \"?([a-z0-9.-]+)\"?", re.IGNORECASE)
_SECRET = re.compile(
    r"secret \"([^\"]+)\" not found|in Secret [^/\s]+/([a-z0-9.-]+)", re.IGNORECASE
)
_NO_ACCOUNT = re.compile(
    r'error looking up service account \S+: serviceaccount "([a-z0-9.-]+)" not found'
)
_IS_SECRET = re.compile(r"\bsecrets?\b", re.IGNORECASE)
_FORBIDDEN = re.compile(r'^.*?[a-z.]+ "[^"]*" is forbidden: ')
_BINDING = re.compile(r" with binding '[^']*'(?= denied request)")
_RPC = re.compile(r"rpc error: code = \w+ desc = ")
_COUNTS = re.compile(r"\b\d+ (?=node|Insufficient|Too many|persistent)", re.IGNORECASE)


def problem_of_pod(pod: Pod, events: Iterable[ObjectEvent] = ()) -> Problem | None:
    """Return why this pod is not ready, None if it is ready or still starting without a problem."""
    if pod.ready or pod.deleting:
        return None
    own_events = tuple(event for event in events if event.pod_uid == pod.uid)
    for check in _CHECKS:
        problem = check(pod, own_events)
        if problem:
            return problem
    return None


def flapping_problem(pod: Pod, now: float) -> Problem | None:
    """Return the problem of a ready pod that keeps terminating, None if it is stable.

    A pod keeps terminating if a container restarted three times and last ended within 10 min.
    """
    if not pod.ready:
        return None
    for container in pod.containers:
        end = container.last_terminated
        recent = end is not None and end.finished is not None and end.finished > now - FLAPPING_S
        if end and recent and container.restarts >= 3:
            return _problem_of_end(pod, container, end)
    return None


def needs_events(pod: Pod, now: float) -> bool:
    """Return True if only events can explain a pod: its setup takes 20 s or longer."""
    is_set_up = bool(pod.containers) and all(
        container.waiting_reason in {"ContainerCreating", "PodInitializing"}
        for container in pod.containers
    )
    return pod.scheduled and not pod.deleting and is_set_up and now - pod.created >= SET_UP_S


def problem_of_creation(message: str, since: float | None = None) -> Problem:
    """Return the problem of a refused pod or child, from the API server's own message."""
    account = _NO_ACCOUNT.search(message)
    if account:
        reason = Reason.MISSING_SERVICE_ACCOUNT
        what = f"ServiceAccount {account.group(1)} does not exist, so no pod can be created"
        return Problem(reason, say(what, "", ADVICE[reason]), since)
    is_quota = "exceeded quota" in message or "must specify" in message
    reason = Reason.QUOTA_EXCEEDED if is_quota else Reason.ADMISSION_DENIED
    by = "The namespace's ResourceQuota" if is_quota else "Admission control"
    what = f"{by} refused a pod or a child"
    return Problem(reason, say(what, _plain_refusal(message), ADVICE[reason]), since)


def lacks_image_volumes(message: str) -> bool:
    """Return True if a part of the cluster reports that it does not know image volumes."""
    return any(words in message for words in NO_IMAGE_VOLUMES)


def _without_image_volumes(pod: Pod, message: str) -> Problem:
    what = "The node cannot mount the image of an oci:// source"
    return _problem(Reason.IMAGE_VOLUMES_UNSUPPORTED, pod, what, _RPC.sub("", message))


def _plain_refusal(message: str) -> str:
    """Return the refusal without the object's name and the policy's binding.

    A pod has a different name at every attempt. Worked example: `pods "chat-x1" is forbidden:
    ValidatingAdmissionPolicy 'a' with binding 'b' denied request: no` becomes
    `ValidatingAdmissionPolicy 'a' denied request: no`.
    """
    text = _FORBIDDEN.sub("", message)
    return _BINDING.sub("", text)


def _of_scheduling(pod: Pod, _events: tuple[ObjectEvent, ...]) -> Problem | None:
    if pod.scheduled or not pod.unschedulable:
        return None
    text = pod.unschedulable
    claim = _CLAIM.search(text)
    if claim or "PersistentVolumeClaim" in text:
        name = claim.group(1) if claim else ""
        is_unbound = "unbound" in text or "not bound" in text
        state = "is not bound" if is_unbound else "does not exist"
        what = (
            f"PersistentVolumeClaim {name} {state}"
            if name and not is_unbound
            else ("A PersistentVolumeClaim of the model is not bound")
        )
        return _problem(Reason.MISSING_VOLUME, pod, what)
    for resource in _EXTENDED_RESOURCE.findall(text):
        if not resource.startswith(_NOT_ACCELERATORS):
            return _problem(Reason.INSUFFICIENT_GPU, pod, f"No node has enough free {resource}")
    return _problem(Reason.UNSCHEDULABLE, pod, "No node fits the pod", _plain_verdict(text))


def _plain_verdict(text: str) -> str:
    """Return the scheduler's verdict without node counts, which change while the cause stays."""
    text = text.split(" preemption:", maxsplit=1)[0]
    text = re.sub(r"^\d+/\d+ nodes are available: ", "", text)
    return _COUNTS.sub("", text)


def _of_images(pod: Pod, _events: tuple[ObjectEvent, ...]) -> Problem | None:
    for container in _unready(pod):
        if container.waiting_reason in IMAGE_REASONS:
            detail = container.waiting_message
            for mark in ("ErrImagePull: ", "ErrImageNeverPull: "):
                detail = detail.rsplit(mark, 1)[-1]
            is_model = any(image in container.waiting_message for image in pod.image_volumes)
            owner = "an oci:// source" if is_model else f"container {container.name}"
            what = f"The image of {owner} cannot be pulled"
            return _problem(Reason.IMAGE_PULL, pod, what, _RPC.sub("", detail))
    return None


def _of_configuration(pod: Pod, _events: tuple[ObjectEvent, ...]) -> Problem | None:
    for container in _unready(pod):
        if container.waiting_reason in CONFIG_REASONS:
            if pod.image_volumes and lacks_image_volumes(container.waiting_message):
                return _without_image_volumes(pod, container.waiting_message)
            return _missing_secret(pod, container.waiting_message) or _problem(
                Reason.CRASH_LOOP,
                pod,
                f"Container {container.name} cannot start",
                _RPC.sub("", container.waiting_message),
                terminations=_ends(container),
            )
    return None


def _of_events(pod: Pod, events: tuple[ObjectEvent, ...]) -> Problem | None:
    volumes = [event for event in events if event.reason in VOLUME_EVENTS]
    if not volumes or any(end for c in pod.containers for end in (c.terminated, c.last_terminated)):
        return None
    newest = max(volumes, key=lambda event: (event.seen, event.message))
    if pod.image_volumes and lacks_image_volumes(newest.message):
        return _without_image_volumes(pod, newest.message)
    return _missing_secret(pod, newest.message) or _problem(
        Reason.MISSING_VOLUME, pod, "A volume cannot be mounted", newest.message
    )


def _of_ends(pod: Pod, _events: tuple[ObjectEvent, ...]) -> Problem | None:
    for container in _unready(pod):
        end = container.terminated or container.last_terminated
        if end and not (container.init and end.exit_code == 0):
            return _problem_of_end(pod, container, end)
    return None


_Check = Callable[[Pod, tuple[ObjectEvent, ...]], Problem | None]
_CHECKS: tuple[_Check, ...] = (
    _of_scheduling,
    _of_images,
    _of_configuration,
    _of_events,
    _of_ends,
)
"""Checked in this order; the first check that returns a problem decides."""


def _problem_of_end(pod: Pod, container: Container, end: Termination) -> Problem:
    """Classify a container's end by the kernel's verdict, the engine's line, or the exit code.

    Exit codes of containers that others added mean something else, and their memory is not the
    engine's: the control loop must not lower the engine's limits for them.
    """
    is_added = pod.component == Component.ENGINE and container.name not in OWN_CONTAINERS
    line = {} if is_added else engine_line(end.message)
    engine_reason = ENGINE_CLASSES.get(str(line.get("class")))
    reason = engine_reason or EXIT_CODE_REASONS.get(end.exit_code, Reason.CRASH_LOOP)
    if end.reason == "OOMKilled" and engine_reason in {None, Reason.CRASH_LOOP}:
        reason = Reason.HOST_OUT_OF_MEMORY
    if is_added:
        reason = Reason.CRASH_LOOP
    detail = str(line.get("message") or "")
    if (
        end.reason == "OOMKilled"
    ):  # the container could not log the cause: the log's last line is unrelated
        what = f"Container {container.name} was OOM-killed"
    else:
        what = f"Container {container.name} terminated with exit code {end.exit_code}"
        detail = detail or _last_line(end.message)
    return _problem(reason, pod, what, detail, terminations=_ends(container))


def engine_line(message: str) -> Mapping[str, object]:
    """Parse the engine's termination line, the text's last JSON object; empty if there is none."""
    for line in reversed(message.strip().splitlines()):
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):  # a container may write JSON of any depth
                continue
            if isinstance(value, dict) and "class" in value:
                return value
    return {}


def _last_line(message: str) -> str:
    """Return the last line of a log, "" for JSON. Kubernetes falls back to the end of the log."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines and not lines[-1].startswith("{") else ""


def _missing_secret(pod: Pod, message: str) -> Problem | None:
    """Return MissingSecret if the message is about a Secret or a key of a Secret."""
    if not _IS_SECRET.search(message):
        return None
    found = _SECRET.search(message)
    name = next((group for group in found.groups() if group), "") if found else ""
    missing_key = re.search(
        r"couldn't find key (\S+) in Secret|non-existent secret key: (\S+)", message
    )
    key = next((group for group in missing_key.groups() if group), "") if missing_key else ""
    secret = f"Secret {name}{_variables(pod, name, key)}" if name else "A Secret"
    what = f"{secret} has no key {key}" if key else f"{secret} does not exist"
    return _problem(Reason.MISSING_SECRET, pod, what, "" if name else message)


def _variables(pod: Pod, secret: str, key: str) -> str:
    """Return the pod's variables from this Secret, and from this key if one is missing, as text."""
    names = [
        use.variable
        for use in pod.secret_uses
        if use.secret == secret and (not key or use.key == key)
    ]
    if not names:
        return ""
    return f" (variable{'s' * (len(names) > 1)} {', '.join(names)})"


def _unready(pod: Pod) -> list[Container]:
    """Return the containers that are not ready, init containers first."""
    waiting = [item for item in pod.containers if not item.ready]
    return sorted(waiting, key=lambda item: not item.init)


def _ends(container: Container) -> int:
    """Return the number of a container's terminations."""
    return container.restarts + (container.terminated is not None)


def _problem(
    reason: Reason, pod: Pod, what: str, detail: str = "", *, terminations: int = 0
) -> Problem:
    """Return a problem of a pod with a message that starts with the pod's name."""
    text = say(f"Pod {pod.name}: {what}", detail, ADVICE[reason])
    return Problem(reason, text, pod.created, terminations)
