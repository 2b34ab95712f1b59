"""The services whose children are kept as golden files, with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from fleetkeeper.api.parse import InferenceService, parse_service
from fleetkeeper.api.profiles.defaults import simulated_catalog
from fleetkeeper.api.profiles.object_storage import ObjectStorage
from fleetkeeper.api.profiles.tracing import Collector, Tracing
from fleetkeeper.api.types import RolloutStrategy
from fleetkeeper.common.values import Manifest
from fleetkeeper.reconcile.context import (
    NetworkPeer,
    NetworkRule,
    PlanContext,
    PodSecurity,
    RouterSettings,
    default_context,
)
from fleetkeeper.reconcile.manifests.children import desired_children
from fleetkeeper.reconcile.manifests.engine_pod import desired_engine_template
from fleetkeeper.reconcile.manifests.prefetch import desired_prefetch_job
from fleetkeeper.reconcile.manifests.router import Router
from fleetkeeper.reconcile.manifests.tuning import AS_SPECIFIED, EngineTuning
from fleetkeeper.reconcile.manifests.vllm_router import DEFAULTS
from tests.support.reconcile.random_specs import service_manifest

COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
PVC: dict[str, Any] = {"source": "pvc://models/llama-3.1-8b"}
IMAGE: dict[str, Any] = {"source": f"oci://registry.example.com/models/llama@sha256:{'a' * 64}"}
HUB: dict[str, Any] = {"source": "hf://meta-llama/Llama-3.1-8B-Instruct", "revision": COMMIT}
GRANT_KEYS = (
    '{"keys":[{"crv":"Ed25519","kid":"one","kty":"OKP",'
    '"x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}'
)
CPU: dict[str, Any] = {"engine": {"profile": "cpu", "dtype": "float32"}}


def _context(**changes: Any) -> PlanContext:
    return replace(default_context(), **changes)


def _own_hub() -> PlanContext:
    """Return a context whose engines download from the installation's own hub."""
    catalog = default_context().catalog
    profiles = tuple(
        item.model_copy(update={"variables": {"HF_ENDPOINT": "https://hub.example.com"}})
        for item in catalog.profiles
    )
    return _context(catalog=catalog.model_copy(update={"profiles": profiles}))


def _traced() -> PlanContext:
    """Return a context whose engines send spans to a collector in the cluster."""
    catalog = default_context().catalog
    tracing = Tracing(
        endpoint="http://otel-collector.observability:4317",
        collector=Collector(
            namespace_labels={"kubernetes.io/metadata.name": "observability"},
            pod_labels={"app.kubernetes.io/name": "opentelemetry-collector"},
        ),
    )
    profiles = tuple(item.model_copy(update={"tracing": tracing}) for item in catalog.profiles)
    return _context(catalog=catalog.model_copy(update={"profiles": profiles}))


def _object_storage(**storage: Any) -> PlanContext:
    """Return a context whose profiles have this object storage."""
    catalog = default_context().catalog
    profiles = tuple(
        item.model_copy(update={"object_storage": ObjectStorage(**storage)})
        for item in catalog.profiles
    )
    return _context(
        catalog=catalog.model_copy(update={"profiles": profiles}),
        engine_service_accounts=("model-*",),
    )


@dataclass(frozen=True)
class GoldenCase:
    """The inputs from which the children of one service are built."""

    spec: Mapping[str, Any]
    replicas: int = 1
    tuning: EngineTuning = AS_SPECIFIED
    strategy: RolloutStrategy = RolloutStrategy.SURGE
    context: PlanContext = field(default_factory=default_context)
    name: str = "chat"

    def service(self) -> InferenceService:
        """Return the service."""
        return parse_service(service_manifest(dict(self.spec), name=self.name))

    def prefetch_job(self, service: InferenceService | None = None) -> Manifest:
        """Return the Job that downloads its model beforehand, or that of another service."""
        service = service or self.service()
        profile = self.context.catalog.resolve(service.spec.engine.profile)
        template = desired_engine_template(service, profile, self.context, self.tuning)
        return desired_prefetch_job(service, template)

    @property
    def vllm_router(self) -> Router:
        """Return the router that an earlier release gave it."""
        settings = self.context.router.model_copy(update=DEFAULTS)
        return Router(settings, is_vllm_router=True, watches_pods=True)

    def children(
        self, service: InferenceService | None = None, router: Router | None = None
    ) -> tuple[Manifest, ...]:
        """Return its children, or those of another service with the same inputs."""
        service = service or self.service()
        profile = self.context.catalog.resolve(service.spec.engine.profile)
        return desired_children(
            service,
            profile,
            self.context,
            replicas=self.replicas,
            tuning=self.tuning,
            strategy=self.strategy,
            router=router,
        )


def _cuda(**sections: Any) -> dict[str, Any]:
    return {"model": PVC, **sections}


def _cpu(**sections: Any) -> dict[str, Any]:
    return {"model": PVC, **CPU, **sections}


_PRIVATE_NETWORK = _context(
    dns_rule=NetworkRule(
        peers=(
            NetworkPeer(
                namespace_labels=MappingProxyType({"kubernetes.io/metadata.name": "kube-system"}),
                pod_labels=MappingProxyType({"k8s-app": "kube-dns"}),
            ),
        ),
        tcp_ports=(53,),
        udp_ports=(53,),
    ),
    api_server_rule=NetworkRule(peers=(NetworkPeer(cidr="10.0.0.1/32"),), tcp_ports=(6443,)),
    model_hub_rule=NetworkRule(
        peers=(NetworkPeer(cidr="10.9.0.0/16", cidr_except=("10.9.1.0/24",)),), tcp_ports=(8443,)
    ),
)

CASES: dict[str, GoldenCase] = {
    "minimal-cuda": GoldenCase(_cuda()),
    "minimal-cpu": GoldenCase(_cpu()),
    "image": GoldenCase({"model": IMAGE}),
    "adapters-from-images": GoldenCase(
        {
            "model": {
                **PVC,
                "adapters": [
                    {"name": "sql", "source": f"{IMAGE['source']}/sql"},
                    {"name": "tone", "source": f"{IMAGE['source']}/tone"},
                    {"name": "law", "source": f"oci://localhost:5000/law@sha256:{'b' * 64}"},
                ],
            }
        }
    ),
    "hub": GoldenCase({"model": HUB}),
    "hub-cache-claim": GoldenCase({"model": {**HUB, "cache": {"claimName": "hub-cache"}}}),
    "hub-cache-ephemeral": GoldenCase({"model": {**HUB, "cache": {"ephemeralSize": "100Gi"}}}),
    "hub-token": GoldenCase({"model": {**HUB, "tokenSecret": {"name": "hf", "key": "token"}}}),
    "object-storage": GoldenCase(
        {"model": {"source": "s3://models/llama/v1", "credentialsSecret": "s3-reader"}},
        context=_object_storage(endpoint="https://minio.storage.svc:9000", path_style=True),
    ),
    "object-storage-account": GoldenCase(
        {"model": {"source": "s3://models/llama/v1"}, "serviceAccountName": "model-reader"},
        context=_object_storage(region="eu-central-1"),
    ),
    "served-name": GoldenCase({"model": {**PVC, "servedName": "llama-3.1-8b-instruct"}}),
    "adapters-same-claim": GoldenCase(
        {
            "model": {
                **PVC,
                "adapters": [
                    {"name": "sql", "source": "pvc://models/sql-lora"},
                    {"name": "tone", "source": "pvc://models/tone-lora"},
                ],
            }
        }
    ),
    "adapters-other-claim": GoldenCase(
        {"model": {**PVC, "adapters": [{"name": "sql", "source": "pvc://adapters.team/sql"}]}}
    ),
    "adapters-from-hub": GoldenCase(
        {
            "model": {
                **PVC,
                "adapters": [
                    {"name": "sql", "source": "hf://acme/sql-lora", "revision": COMMIT},
                ],
                "cache": {"claimName": "hub-cache"},
            }
        }
    ),
    "tensor-parallel": GoldenCase(_cuda(engine={"tensorParallelSize": 4})),
    "mig": GoldenCase(
        _cuda(resources={"accelerator": {"resource": "nvidia.com/mig-3g.40gb", "count": 1}})
    ),
    "quantized": GoldenCase(_cuda(engine={"quantization": "fp8", "maxModelLength": 8192})),
    "no-prefix-caching": GoldenCase(_cuda(engine={"prefixCaching": False, "dtype": "bfloat16"})),
    "options": GoldenCase(
        _cuda(engine={"options": {"enforce-eager": "true", "kv-cache-dtype": "fp8"}})
    ),
    "speculative": GoldenCase(
        _cuda(engine={"options": {"spec-method": "ngram", "spec-tokens": "4"}})
    ),
    "environment": GoldenCase(
        _cuda(
            engine={
                "env": [
                    {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
                    {"name": "NCCL_DEBUG", "value": "INFO"},
                ]
            }
        )
    ),
    "environment-from-secret": GoldenCase(
        {
            "model": {**HUB, "tokenSecret": {"name": "hf"}},
            "engine": {
                "env": [
                    {"name": "NO_PROXY", "value": ""},
                    {
                        "name": "HTTPS_PROXY",
                        "valueFrom": {"secretKeyRef": {"name": "proxy", "key": "url"}},
                    },
                ]
            },
        }
    ),
    "resources-canonical": GoldenCase(
        _cpu(resources={"cpu": "1500m", "memory": "4096Mi", "sharedMemory": "0.5Gi"})
    ),
    "ephemeral-storage": GoldenCase(
        {
            "model": {**HUB, "cache": {"ephemeralSize": "100Gi"}},
            "resources": {"ephemeralStorage": "122880Mi"},
        }
    ),
    "resources-decimal": GoldenCase(
        _cuda(resources={"cpu": "0.5", "memory": "20000M", "sharedMemory": "1e9"})
    ),
    "memory-cap": GoldenCase(_cpu(memory={"capPercent": 60})),
    "placement": GoldenCase(
        _cuda(
            placement={
                "nodeSelector": {"gpu": "h100", "zone": "a"},
                "tolerations": [
                    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
                    {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0},
                ],
                "priorityClassName": "serving",
                "runtimeClassName": "nvidia",
                "schedulerName": "bin-packer",
            }
        )
    ),
    "affinity": GoldenCase(
        _cuda(
            placement={
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [
                                {
                                    "matchExpressions": [
                                        {"key": "gpu", "operator": "In", "values": ["h100"]},
                                        {"key": "spot", "operator": "DoesNotExist"},
                                    ]
                                }
                            ]
                        },
                        "preferredDuringSchedulingIgnoredDuringExecution": [
                            {
                                "weight": 50,
                                "preference": {
                                    "matchExpressions": [
                                        {"key": "cpus", "operator": "Gt", "values": ["31"]}
                                    ]
                                },
                            }
                        ],
                    },
                    "podAntiAffinity": {
                        "preferredDuringSchedulingIgnoredDuringExecution": [
                            {
                                "weight": 100,
                                "podAffinityTerm": {
                                    "labelSelector": {"matchLabels": {"noisy": "yes"}},
                                    "topologyKey": "kubernetes.io/hostname",
                                },
                            }
                        ]
                    },
                }
            }
        )
    ),
    "affinity-to-every-pod": GoldenCase(
        _cuda(
            placement={
                "affinity": {
                    "podAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [
                            {"labelSelector": {}, "topologyKey": "topology.kubernetes.io/zone"}
                        ]
                    }
                }
            }
        )
    ),
    "no-topology-spread": GoldenCase(_cuda(placement={"topologySpreadConstraints": []})),
    "topology-spread": GoldenCase(
        _cuda(
            placement={
                "topologySpreadConstraints": [
                    {
                        "maxSkew": 2,
                        "topologyKey": "topology.kubernetes.io/zone",
                        "whenUnsatisfiable": "DoNotSchedule",
                        "minDomains": 3,
                        "nodeAffinityPolicy": "Ignore",
                        "nodeTaintsPolicy": "Honor",
                    },
                    {
                        "maxSkew": 1,
                        "topologyKey": "topology.kubernetes.io/zone",
                        "whenUnsatisfiable": "ScheduleAnyway",
                    },
                ]
            }
        )
    ),
    "pod-metadata": GoldenCase(
        _cuda(
            podMetadata={
                "labels": {"kueue.x-k8s.io/queue-name": "serving", "team": "a", "empty": ""},
                "annotations": {"sidecar.istio.io/inject": "true", "empty": ""},
            }
        ),
        context=_context(
            pod_metadata_names=("kueue.x-k8s.io/queue-name", "sidecar.istio.io/inject")
        ),
    ),
    "pull-secrets": GoldenCase(_cuda(imagePullSecrets=[{"name": "registry"}, {"name": "mirror"}])),
    "replicas-three": GoldenCase(_cuda(replicas=3), replicas=3),
    "stopped": GoldenCase(_cuda(replicas=0), replicas=0),
    "batching": GoldenCase(
        _cuda(batching={"minSequences": 8, "maxSequences": 64, "minTokens": 512, "maxTokens": 4096})
    ),
    "objectives-and-tiers": GoldenCase(
        _cuda(
            objectives={"queueWaitMilliseconds": 200, "batchTimeMilliseconds": 30},
            tiers={
                "realtime": {"queueLimit": 16},
                "standard": {"queueLimit": 0},
                "batch": {"queueLimit": 4096, "sharePercent": 50, "floorPercent": 0},
            },
        )
    ),
    "routing-none": GoldenCase(_cuda(routing={"policy": "None"})),
    "routing-none-same-namespace": GoldenCase(
        _cuda(routing={"policy": "None"}, networkPolicy={"preset": "SameNamespace"})
    ),
    "routing-session": GoldenCase(_cuda(routing={"policy": "SessionAffinity", "replicas": 3})),
    "routing-prefix": GoldenCase(_cuda(routing={"policy": "PrefixAware"})),
    "routing-one": GoldenCase(_cuda(routing={"replicas": 1})),
    "routing-placement": GoldenCase(
        _cuda(
            routing={
                "placement": {
                    "nodeSelector": {"pool": "cpu"},
                    "tolerations": [
                        {"key": "dedicated", "value": "", "effect": "NoSchedule"},
                        {"key": "cpu", "operator": "Exists"},
                    ],
                    "affinity": {
                        "podAntiAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": [
                                {
                                    "labelSelector": {
                                        "matchLabels": {"fleetkeeper.io/component": "router"}
                                    },
                                    "topologyKey": "kubernetes.io/hostname",
                                }
                            ]
                        }
                    },
                    "priorityClassName": "serving",
                },
                "resources": {"cpu": "1500m", "memory": "2048Mi"},
            }
        )
    ),
    "routing-round-robin": GoldenCase(_cuda(routing={"policy": "RoundRobin"})),
    "service-load-balancer": GoldenCase(
        _cuda(
            service={
                "type": "LoadBalancer",
                "loadBalancerClass": "example.com/internal",
                "annotations": {"example.com/scheme": "internal", "empty": ""},
            }
        ),
        context=_context(exposed_service_types=("LoadBalancer",)),
    ),
    "service-annotations": GoldenCase(_cuda(service={"annotations": {"team": "a"}})),
    "policy-same-namespace": GoldenCase(_cuda(networkPolicy={"preset": "SameNamespace"})),
    "policy-namespaces": GoldenCase(
        _cuda(
            networkPolicy={
                "preset": "Namespaces",
                "namespaceSelector": {
                    "matchLabels": {"tenant": "a"},
                    "matchExpressions": [{"key": "env", "operator": "NotIn", "values": ["dev"]}],
                },
            }
        )
    ),
    "policy-every-namespace": GoldenCase(
        _cuda(networkPolicy={"preset": "Namespaces", "namespaceSelector": {}})
    ),
    "policy-gateway": GoldenCase(
        _cuda(
            networkPolicy={
                "preset": "Gateway",
                "peers": [
                    {"podSelector": {"matchLabels": {"app": "web"}}},
                    {"podSelector": {}},
                    {"namespaceSelector": {}},
                    {
                        "podSelector": {"matchLabels": {"app": "web"}},
                        "namespaceSelector": {"matchLabels": {"tenant": "b"}},
                    },
                ],
                "cidrs": [
                    {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]},
                    {"cidr": "2001:db8::/32"},
                ],
            }
        )
    ),
    "access-gateway": GoldenCase(
        _cuda(access="Gateway", networkPolicy={"preset": "Gateway"}),
        context=_context(grant_keys=GRANT_KEYS),
    ),
    "access-gateway-without-keys": GoldenCase(_cuda(access="Gateway")),
    "access-open-with-keys": GoldenCase(
        _cuda(routing={"policy": "None"}), context=_context(grant_keys=GRANT_KEYS)
    ),
    "rollout-numbers": GoldenCase(
        _cuda(
            rollout={
                "maxSurge": 2,
                "maxUnavailable": 1,
                "drainSeconds": 0,
                "startupSeconds": 60,
            }
        ),
        replicas=4,
    ),
    "rollout-percent": GoldenCase(
        _cuda(
            rollout={"maxSurge": "25%", "maxUnavailable": "10%"},
            disruption={"maxUnavailable": "50%"},
        ),
        replicas=4,
    ),
    "rollout-replace": GoldenCase(_cuda(), strategy=RolloutStrategy.REPLACE, replicas=2),
    "rollout-long": GoldenCase(_cuda(rollout={"drainSeconds": 3600, "startupSeconds": 86400})),
    "disruption-none": GoldenCase(_cuda(disruption={"maxUnavailable": 0})),
    "remedy-sequences": GoldenCase(_cuda(), tuning=EngineTuning(max_sequences=128)),
    "remedy-below-floor": GoldenCase(
        _cuda(batching={"minSequences": 32}), tuning=EngineTuning(max_sequences=16, cap_percent=75)
    ),
    "keys": GoldenCase(
        _cuda(),
        context=_context(
            control_keys='{"keys":[{"crv":"Ed25519","kid":"a1","kty":"OKP","x":"AAAA"}]}'
        ),
    ),
    "openshift-user": GoldenCase(
        {"model": {**HUB, "cache": {"claimName": "hub-cache"}}},
        context=_context(security=PodSecurity(user=None, group=None)),
    ),
    "network-narrow": GoldenCase({"model": HUB}, context=_PRIVATE_NETWORK),
    "network-closed": GoldenCase(
        {"model": HUB},
        context=_context(operator_peers=(), prometheus_peers=(), model_hub_rule=None),
    ),
    "namespaced-install": GoldenCase(
        _cuda(),
        context=_context(
            router=RouterSettings(role_kind="Role"),
            image_pull_secrets=("fleetkeeper-pull",),
        ),
    ),
    "claims": GoldenCase(
        _cuda(
            engine={"tensorParallelSize": 2},
            resources={
                "claims": [
                    {"name": "gpus", "resourceClaimTemplateName": "two-gpus", "request": "gpu"},
                    {"name": "network", "resourceClaimName": "shared-nic"},
                ]
            },
        )
    ),
    "claims-beside-accelerators": GoldenCase(
        _cuda(
            resources={
                "accelerator": {},
                "claims": [{"name": "network", "resourceClaimTemplateName": "nic"}],
            }
        )
    ),
    "claims-on-cpu": GoldenCase(
        _cpu(resources={"claims": [{"name": "network", "resourceClaimTemplateName": "nic"}]})
    ),
    "service-account": GoldenCase(
        _cuda(
            serviceAccountName="model-reader",
            podMetadata={"labels": {"azure.workload.identity/use": "true"}},
        ),
        context=_context(
            engine_service_accounts=("model-*",),
            pod_metadata_names=("azure.workload.identity/use",),
        ),
    ),
    "traced": GoldenCase(_cpu(), context=_traced()),
    "simulated": GoldenCase(
        {
            "model": {
                **HUB,
                "tokenSecret": {"name": "hf"},
                "cache": {"claimName": "hub-cache"},
                "adapters": [
                    {"name": "sql", "source": "pvc://models/sql-lora"},
                    {"name": "legal", "source": f"oci://r.example.com/legal@sha256:{'b' * 64}"},
                ],
            },
            "engine": {"profile": "simulated"},
        },
        replicas=3,
        context=_context(catalog=simulated_catalog()),
    ),
    "long-name": GoldenCase(_cpu(), name="a" * 49 + "z"),
    "everything": GoldenCase(
        {
            "model": {
                **HUB,
                "servedName": "chat",
                "tokenSecret": {"name": "hf"},
                "cache": {"claimName": "hub-cache"},
                "adapters": [{"name": "sql", "source": "pvc://models/sql-lora"}],
            },
            "engine": {
                "profile": "cuda-0.32.0-1",
                "quantization": "fp8",
                "maxModelLength": 8192,
                "tensorParallelSize": 2,
                "options": {"max-lora-rank": "32"},
            },
            "resources": {
                "accelerator": {"resource": "nvidia.com/gpu", "count": 2},
                "cpu": "8",
                "memory": "64Gi",
                "sharedMemory": "8Gi",
            },
            "memory": {"capPercent": 70},
            "scaling": {"minReplicas": 2, "maxReplicas": 6},
            "imagePullSecrets": [{"name": "registry"}],
            "routing": {"policy": "SessionAffinity", "replicas": 2},
            "networkPolicy": {"preset": "SameNamespace"},
            "disruption": {"maxUnavailable": 2},
        },
        replicas=2,
        context=_own_hub(),
    ),
}
