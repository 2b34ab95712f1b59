"""Every reason that a kubelet or an engine can report, by the pod status that they write."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from fleetkeeper_contract.exit_codes import DeathClass
from fleetkeeper_engine.supervisor.termination import Death
from fleetkeeper_local.control_plane.control_plane import ControlPlane
from tests.support.operators.manual_node import manual_node, report
from tests.support.operators.operator_world import Live, World, operator_world, service
from tests.support.operators.reason_checks import advice_of, not_ready


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane) -> AsyncIterator[World]:
    async with operator_world(control_plane, "operator-pod-reasons") as found:
        yield found


MODEL_IMAGE = f"registry.example.com/llama@sha256:{'a' * 64}"
WAITING: dict[str, tuple[str, str, str]] = {
    "image": (
        "ImagePull",
        "ImagePullBackOff",
        'Back-off pulling image "x": ErrImagePull: not found',
    ),
    "secret": ("MissingSecret", "CreateContainerConfigError", 'secret "hf" not found'),
    "variable": ("MissingSecret", "CreateContainerConfigError", 'secret "proxy" not found'),
    "model-image": (
        "ImagePull",
        "ImagePullBackOff",
        f'Back-off pulling image "{MODEL_IMAGE}": ErrImagePull: not found',
    ),
    "old-runtime": (
        "ImageVolumesUnsupported",
        "CreateContainerError",
        'failed to generate container "c" spec: failed to generate spec: failed to mkdir "": mkdir : no such file or directory',
    ),
}
SAYS = {
    "variable": ("Secret proxy (variable HTTPS_PROXY)",),
    "model-image": ("The image of an oci:// source",),
}
FROM_IMAGES = {"model-image", "old-runtime"}
VARIABLE = {"name": "HTTPS_PROXY", "valueFrom": {"secretKeyRef": {"name": "proxy", "key": "url"}}}
ENDS: dict[str, tuple[str, DeathClass | None]] = {
    "option": ("BadEngineOption", DeathClass.BAD_ENGINE_OPTION),
    "model": ("ModelNotFound", DeathClass.MODEL_NOT_FOUND),
    "gated": ("ModelNotReadable", DeathClass.MODEL_NOT_READABLE),
    "arch": ("UnsupportedArchitecture", DeathClass.UNSUPPORTED_ARCHITECTURE),
    "gpu-memory": ("CUDAOutOfMemory", DeathClass.CUDA_OUT_OF_MEMORY),
    "memory": ("HostOutOfMemory", DeathClass.HOST_OUT_OF_MEMORY),
    "hung": ("EngineHung", DeathClass.HUNG),
    "unknown": ("CrashLoop", DeathClass.UNKNOWN),
    "killed": ("HostOutOfMemory", None),
}


SOME = {"secret", "model-image", "option", "killed"}
"""One of each way: before the start, an image of a model, the engine's own account, the kernel's."""


@pytest.mark.parametrize(
    "names",
    [SOME, pytest.param({*WAITING, *ENDS}, marks=pytest.mark.exhaustive)],
    ids=["some", "all"],
)
async def test_what_a_kubelet_and_the_engine_report(world: World, names: set[str]) -> None:
    """Pods whose status is what a kubelet reports, with the line that the real engine writes.

    tests/unit/reconcile/test_reasons.py has every reason without an API server.
    """
    with manual_node(world) as selector:
        await world.operator().start().leads()
        for name in sorted(names):
            variables = [VARIABLE] if name == "variable" else []
            image = {"source": f"oci://{MODEL_IMAGE}"}
            await world.create(
                service(
                    name,
                    **({"model": image} if name in FROM_IMAGES else {}),
                    engine={"env": variables},
                    placement={"nodeSelector": selector},
                )
            )
        for name in sorted(names):
            if name in WAITING:
                _, reason, message = WAITING[name]
                await report(world, name, {"waiting": {"reason": reason, "message": message}})
            else:
                back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
                await report(world, name, back_off, 3, terminated=_end(ENDS[name][1]))
        reasons = {name: reason for name, (reason, *_) in WAITING.items()}
        reasons |= {name: reason for name, (reason, _) in ENDS.items()}
        for name in sorted(names):
            words = (advice_of(reasons[name]), *SAYS.get(name, ()))
            await not_ready(world, name, reasons[name], *words)


def _end(death: DeathClass | None) -> Live:
    """How the container ended: by the engine's own account, else killed by the kernel."""
    times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:01:00Z"}
    if death is None:
        return {"exitCode": 137, "reason": "OOMKilled", "containerID": "containerd://a", **times}
    end = Death(death, "as the engine reports it", "start", "last output")
    return {
        "exitCode": end.code,
        "reason": "Error",
        "message": end.termination_line(),
        "containerID": "containerd://a",
        **times,
    }
