"""A podTemplate with what administrators ask for: RDMA, a container that reads logs, and volumes."""

from __future__ import annotations

from typing import Any

PROFILE: dict[str, Any] = {
    "name": "cuda-0.32.0-2",
    "accelerator": "cuda",
    "vllmVersion": "0.32.0",
    "delivery": "inject",
    "image": "vllm/vllm-openai:v0.32.0",
    "injectedImage": "fleetkeeper-engine:0.1.0",
}
LOGS_IMAGE = "registry.example.com/fluent-bit:4.1.1"
RESTRICTED: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
RDMA_AND_LOGS: dict[str, Any] = {
    "metadata": {"labels": {"team": "platform"}, "annotations": {"example.com/empty": ""}},
    "spec": {
        "containers": [
            {
                "name": "engine",
                "env": [{"name": "NCCL_IB_HCA", "value": "mlx5_0"}],
                "resources": {
                    "limits": {"rdma/hca_shared_devices_a": 1},
                    "requests": {"rdma/hca_shared_devices_a": 1},
                },
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                "volumeMounts": [
                    {"name": "vllm-logging", "mountPath": "/etc/vllm", "readOnly": True},
                    {"name": "vllm-logs", "mountPath": "/var/log/vllm"},
                ],
            },
            {
                "name": "logs",
                "image": LOGS_IMAGE,
                "args": ["-c", "/etc/vllm/fluent-bit.conf"],
                "env": [
                    {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
                ],
                "ports": [{"name": "logs", "containerPort": 2020}],
                "readinessProbe": {"tcpSocket": {"port": "logs"}, "periodSeconds": 5},
                "resources": {
                    "limits": {"memory": "128Mi"},
                    "requests": {"cpu": 0.1, "memory": "128Mi"},
                },
                "securityContext": RESTRICTED,
                "volumeMounts": [
                    {"name": "vllm-logging", "mountPath": "/etc/vllm", "readOnly": True},
                    {"name": "vllm-logs", "mountPath": "/var/log/vllm", "readOnly": True},
                    {"name": "tmp", "mountPath": "/tmp"},
                ],
            },
        ],
        "volumes": [
            {"name": "vllm-logs", "emptyDir": {"sizeLimit": "1024Mi"}},
            {"name": "vllm-logging", "configMap": {"name": "vllm-logging", "optional": True}},
        ],
        "tolerations": [{"key": "rdma", "operator": "Exists"}],
        "nodeSelector": {"example.com/rdma": "true"},
    },
}

EVERY_FORM: dict[str, Any] = {
    "metadata": {"annotations": {"a": "", "b": "x"}, "labels": {"empty": ""}},
    "spec": {
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "rdma", "operator": "Exists"}]}
                    ]
                }
            },
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 1,
                        "podAffinityTerm": {
                            "labelSelector": {"matchLabels": {"a": ""}},
                            "topologyKey": "kubernetes.io/hostname",
                        },
                    }
                ]
            },
        },
        "containers": [
            {
                "name": "engine",
                "imagePullPolicy": "Always",
                "env": [
                    {"name": "A", "value": "1"},
                    {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                    {
                        "name": "C",
                        "valueFrom": {
                            "configMapKeyRef": {"name": "c", "key": "k", "optional": True}
                        },
                    },
                    {
                        "name": "D",
                        "valueFrom": {
                            "resourceFieldRef": {
                                "containerName": "engine",
                                "resource": "limits.memory",
                            }
                        },
                    },
                ],
                "ports": [{"containerPort": 4791, "protocol": "UDP"}, {"containerPort": 5000}],
                "resources": {
                    "limits": {"rdma/hca": 1000, "example.com/fpga": "2"},
                    "requests": {"rdma/hca": "1k", "example.com/fpga": 2},
                },
                "securityContext": {
                    "capabilities": {"add": ["IPC_LOCK", "SYS_NICE"]},
                    "readOnlyRootFilesystem": False,
                    "runAsNonRoot": False,
                    "runAsUser": 0,
                },
                "volumeDevices": [{"name": "claim", "devicePath": "/dev/block"}],
                "volumeMounts": [
                    {"name": "infiniband", "mountPath": "/dev/infiniband"},
                    {"name": "all", "mountPath": "/etc/all", "readOnly": True},
                ],
            },
            {
                "name": "logs",
                "image": LOGS_IMAGE,
                "command": ["sleep"],
                "args": ["infinity"],
                "envFrom": [{"configMapRef": {"name": "c"}, "prefix": "P_"}],
                "lifecycle": {"preStop": {"exec": {"command": ["sync"]}}},
                "livenessProbe": {"httpGet": {"path": "/", "port": 2020}, "timeoutSeconds": 5},
                "ports": [{"containerPort": 2020, "name": "logs"}],
                "readinessProbe": {"tcpSocket": {"port": "logs"}},
                "resources": {
                    "limits": {"memory": "1024Mi", "ephemeral-storage": "1G"},
                    "requests": {"cpu": 0.5, "memory": "0.5Gi"},
                },
                "securityContext": RESTRICTED,
                "startupProbe": {"exec": {"command": ["true"]}},
                "volumeMounts": [{"name": "home", "mountPath": "/home/engine", "readOnly": True}],
            },
        ],
        "dnsConfig": {"options": [{"name": "ndots", "value": "1"}]},
        "dnsPolicy": "ClusterFirstWithHostNet",
        "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}],
        "hostNetwork": True,
        "imagePullSecrets": [{"name": "mine"}],
        "initContainers": [
            {
                "name": "tail",
                "image": LOGS_IMAGE,
                "restartPolicy": "Always",
                "resources": {"requests": {"memory": "64Mi"}, "limits": {}},
            }
        ],
        "nodeSelector": {"example.com/rdma": "true", "empty": ""},
        "priorityClassName": "high",
        "readinessGates": [{"conditionType": "example.com/ready"}],
        "runtimeClassName": "nvidia",
        "schedulerName": "other",
        "schedulingGates": [{"name": "example.com/gate"}],
        "securityContext": {"supplementalGroups": [0, 44], "fsGroup": 0},
        "tolerations": [
            {"key": "rdma", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0},
            {"operator": "Exists"},
        ],
        "topologySpreadConstraints": [
            {
                "maxSkew": 2,
                "topologyKey": "example.com/rack",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"a": "b"}},
            }
        ],
        "volumes": [
            {"name": "empty", "emptyDir": {}},
            {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "2048Mi"}},
            {"name": "infiniband", "hostPath": {"path": "/dev/infiniband", "type": "Directory"}},
            {"name": "claim", "persistentVolumeClaim": {"claimName": "block"}},
            {"name": "nfs", "nfs": {"server": "10.0.0.1", "path": "/x"}},
            {"name": "csi", "csi": {"driver": "a.example.com", "volumeAttributes": {"k": "v"}}},
            {"name": "image", "image": {"reference": "a:1", "pullPolicy": "Always"}},
            {
                "name": "scratch",
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {
                            "accessModes": ["ReadWriteOnce"],
                            "resources": {"requests": {"storage": "1024Gi"}},
                        }
                    }
                },
            },
            {
                "name": "all",
                "projected": {
                    "sources": [
                        {"serviceAccountToken": {"path": "t", "audience": "a"}},
                        {"configMap": {"name": "c", "items": [{"key": "k", "path": "k"}]}},
                        {"secret": {"name": "s", "optional": True}},
                        {
                            "downwardAPI": {
                                "items": [
                                    {
                                        "path": "labels",
                                        "fieldRef": {"fieldPath": "metadata.labels"},
                                    },
                                    {
                                        "path": "cpu",
                                        "resourceFieldRef": {
                                            "containerName": "engine",
                                            "resource": "requests.cpu",
                                            "divisor": "0.001",
                                        },
                                    },
                                ]
                            }
                        },
                    ]
                },
            },
        ],
    },
}
"""A value of each form that the API server stores differently from what people write."""
