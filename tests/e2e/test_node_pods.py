"""What a pod may count on here: logs, exec, limits, probes, an orderly end, the API."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request

import pytest

from fleetkeeper_local.control_plane.access import KubectlError
from fleetkeeper_local.control_plane.ports import free_ports
from fleetkeeper_local.control_plane.programs import program_path
from tests.support.node.node_world import Pods, pod_manifest, until

pytestmark = [pytest.mark.usefixtures("images_ahead"), pytest.mark.exhaustive]

SERVE = "import http.server as h; h.test(HandlerClass=h.SimpleHTTPRequestHandler, port=8080)"
SLEEP = "import time; print('up'); time.sleep(3600)"


def test_logs_exec_and_port_forward_reach_the_container(pods: Pods, python_image: str) -> None:
    """The three ways into a pod work through the API server, with certificates on both legs."""
    ready = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}
    script = f"import os; os.chdir('/etc'); print('hello'); {SERVE}"
    pods.create(pod_manifest("web", python_image, script, readinessProbe=ready))
    pods.await_ready("web")
    assert "hello" in pods.logs("web")
    assert pods.kubectl("exec", "web", "--", "id", "-u").strip() == "1000"
    [port] = free_ports(1)
    argv = [program_path("kubectl"), "--kubeconfig", pods.cluster.kubeconfig, "-n", pods.namespace]
    argv += ["port-forward", "pod/web", f"{port}:8080"]
    with subprocess.Popen([str(word) for word in argv], stdout=subprocess.PIPE) as forward:
        assert forward.stdout is not None
        assert b"Forwarding" in forward.stdout.readline()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/os-release", timeout=300) as reply:
            assert b"Debian" in reply.read()
        forward.terminate()


def test_a_container_over_its_memory_limit_is_oomkilled_and_says_so(
    pods: Pods, python_image: str
) -> None:
    """The kernel ends it at its own limit, and the status carries the reason and exit code 137."""
    pods.create(
        pod_manifest(
            "greedy",
            python_image,
            "x = bytearray(200 << 20); print(len(x))",
            resources={"limits": {"memory": "64Mi"}},
        )
    )
    ended = pods.await_ended("greedy")
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def test_a_cpu_limit_slows_a_container_down(pods: Pods, python_image: str) -> None:
    """200 m of CPU give a busy loop about a fifth of a core, never half."""
    script = (
        "import time; b = time.monotonic(); c = time.process_time()\n"
        "while time.monotonic() - b < 3: pass\n"
        "print((time.process_time() - c) / 3)"
    )
    share = float(
        pods.run(
            "busy", python_image, script, resources={"limits": {"cpu": "200m", "memory": "64Mi"}}
        )
    )
    assert 0.02 < share < 0.4


def test_a_failed_liveness_probe_restarts_the_container(pods: Pods, python_image: str) -> None:
    """The kubelet ends a container whose probe fails, and starts it again."""
    manifest = pod_manifest(
        "sick",
        python_image,
        SLEEP,
        livenessProbe={"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 2},
    )
    manifest["spec"]["restartPolicy"] = "Always"
    manifest["spec"]["terminationGracePeriodSeconds"] = 1
    pods.create(manifest)
    until(lambda: pods.container("sick").get("restartCount", 0) >= 1, "a restart")


def test_readiness_follows_the_probe_both_ways(pods: Pods, python_image: str) -> None:
    """A pod turns ready with its probe, and unready again with it, without a restart."""
    probe = {
        "exec": {"command": ["test", "-e", "/tmp/ready"]},
        "periodSeconds": 1,
        "failureThreshold": 1,
    }
    pods.create(pod_manifest("gate", python_image, SLEEP, readinessProbe=probe))
    until(lambda: pods.container("gate").get("started"), "the container runs")
    assert not pods.container("gate")["ready"]
    pods.kubectl("exec", "gate", "--", "touch", "/tmp/ready")
    pods.await_ready("gate")
    pods.kubectl("exec", "gate", "--", "rm", "/tmp/ready")
    until(lambda: not pods.container("gate")["ready"], "unready again")
    assert pods.container("gate")["restartCount"] == 0


def test_prestop_and_sigterm_are_both_honoured_within_the_grace_period(
    pods: Pods, python_image: str
) -> None:
    """A pod's end waits for its preStop hook, then for its handler of SIGTERM: 2 s and 2 s here."""
    script = (
        "import signal, sys, time\n"
        "def bye(*_): time.sleep(2); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, bye); print('up'); time.sleep(3600)"
    )
    hook = {"preStop": {"exec": {"command": ["sleep", "2"]}}}
    manifest = pod_manifest("polite", python_image, script, lifecycle=hook)
    manifest["spec"]["terminationGracePeriodSeconds"] = 30
    pods.create(manifest)
    until(
        lambda: "up" in pods.logs("polite") if pods.container("polite").get("started") else None,
        "up",
    )
    began = time.monotonic()
    pods.kubectl("delete", "pod", "polite")
    assert time.monotonic() - began >= 4.0


def test_a_pod_reaches_the_api_with_its_own_account_and_rights(
    pods: Pods, python_image: str
) -> None:
    """The mounted token and authority suffice; what its Role does not name is refused: 403."""
    pods.kubectl("create", "role", "reader", "--verb=list", "--resource=pods")
    pods.kubectl(
        "create",
        "rolebinding",
        "reader",
        "--role=reader",
        f"--serviceaccount={pods.namespace}:default",
    )
    script = f"""
import ssl, time, urllib.error, urllib.request
home = "/var/run/secrets/kubernetes.io/serviceaccount/"
token = open(home + "token").read()
context = ssl.create_default_context(cafile=home + "ca.crt")
def code(path):
    url = "https://kubernetes.default.svc" + path
    request = urllib.request.Request(url, headers={{"Authorization": "Bearer " + token}})
    for attempt in range(50):
        try:
            return urllib.request.urlopen(request, context=context).status
        except urllib.error.HTTPError as error:
            return error.code
        except urllib.error.URLError:
            time.sleep(0.2)  # the Service's rules may be seconds younger than the pod
print(code("/api/v1/namespaces/{pods.namespace}/pods"), code("/api/v1/nodes"))
"""
    assert pods.run("client", python_image, script).split() == ["200", "403"]


def test_a_pod_that_is_not_hardened_is_refused_where_the_namespace_asks_for_it(
    pods: Pods, python_image: str
) -> None:
    """Pod Security "restricted" is enforced at admission."""
    manifest = pod_manifest("loose", python_image, SLEEP)
    del manifest["spec"]["securityContext"]
    with pytest.raises(KubectlError, match="violates PodSecurity"):
        pods.create(manifest)


def test_an_eviction_waits_for_the_disruption_budget(pods: Pods, python_image: str) -> None:
    """While a budget would be broken an eviction is refused (429); afterwards it goes through."""
    pods.create(
        pod_manifest("guarded", python_image, SLEEP),
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "guard"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "guarded"}}},
        },
    )
    pods.await_ready("guarded")
    until(
        lambda: json.loads(pods.kubectl("get", "pdb", "guard", "-o", "json"))["status"].get(
            "currentHealthy"
        ),
        "the budget counts the pod",
    )
    path = f"/api/v1/namespaces/{pods.namespace}/pods/guarded/eviction"
    eviction = json.dumps(
        {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": "guarded", "namespace": pods.namespace},
        }
    )
    with pytest.raises(KubectlError, match="disruption budget"):
        pods.kubectl("create", "--raw", path, "-f", "-", input=eviction)
    assert pods.get("guarded") is not None
    pods.kubectl("delete", "pdb", "guard")
    pods.kubectl("create", "--raw", path, "-f", "-", input=eviction)
    until(lambda: pods.get("guarded") is None, "the pod is gone")


def test_a_missing_image_and_missing_resources_are_told(pods: Pods, python_image: str) -> None:
    """What an operator must read from pods: ErrImagePull, and Unschedulable."""
    registry = python_image.split("/", 1)[0]
    pods.create(
        pod_manifest("lost", f"{registry}/nothing/here:1", SLEEP),
        pod_manifest("vast", python_image, SLEEP, resources={"requests": {"cpu": "1000"}}),
    )
    until(
        lambda: (
            pods.container("lost").get("state", {}).get("waiting", {}).get("reason")
            in ("ErrImagePull", "ImagePullBackOff")
        ),
        "the image cannot be pulled",
    )

    def unschedulable() -> bool:
        pod = pods.get("vast") or {"status": {}}
        return any(
            (condition["type"], condition.get("reason")) == ("PodScheduled", "Unschedulable")
            for condition in pod["status"].get("conditions", ())
        )

    until(unschedulable, "Unschedulable")
