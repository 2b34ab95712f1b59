"""Random specs of an InferenceService, drawn from the schema of the types.

Seeded: the same generator state draws the same spec. Bounds, enums and patterns come from the
schema; the rules between fields are met by drawing again. Used for properties over "any spec that
the API accepts".
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache
from typing import Any

from fleetkeeper.api.names import API_VERSION, KIND
from fleetkeeper.api.options import ALLOWED, option_errors
from fleetkeeper.api.parse import InferenceService, InvalidService, parse_service
from fleetkeeper.api.profiles.metadata_names import is_allowed
from fleetkeeper.api.profiles.profile import EngineProfile
from fleetkeeper.api.types import InferenceServiceSpec
from fleetkeeper.reconcile.context import default_context
from fleetkeeper.reconcile.wanted import refusals
from tests.support.reconcile.dangerous_metadata import add_dangerous

try:  # the parser that `re` itself uses
    from re import _constants as sre  # type: ignore[attr-defined]
    from re import _parser as sre_parser  # type: ignore[attr-defined]
except ImportError as problem:  # pragma: no cover
    raise RuntimeError("this Python keeps its regular expression parser elsewhere") from problem

QUANTITIES: dict[str, tuple[str | int, ...]] = {
    "cpu": ("500m", "1", "2", "4", "7.5", "16", "1000m", "0.25", 6),
    "memory": ("2Gi", "3.5Gi", "4096Mi", "32Gi", "1e10", "20G", "68719476736", "1024Gi", 2**35),
    "sharedMemory": ("64Mi", "1Gi", "512M", "1.5Gi", "0.5Gi"),
    "ephemeralStorage": ("1Ti", "2000G", "1.5Ti"),
    "ephemeralSize": ("1Gi", "100Gi", "250G", "1Ti"),
}
ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "eth",
    "HTTPS_PROXY": "http://proxy.example.com:3128",
    "NO_PROXY": "10.0.0.0/8,.svc",
    "NCCL_DEBUG": "INFO",
    "NCCL_P2P_DISABLE": "1",
}
CIDRS = (
    {"cidr": "192.0.2.0/24"},
    {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.2.3.4/32"]},
    {"cidr": "2001:db8::/32", "except": []},
)
CONTEXT = default_context()
PROFILE = CONTEXT.catalog.resolve("cuda")
KEYS = ("team", "example.com/cost-centre", "app.kubernetes.io/part-of", "zone", "a.b/C_d.e")


@lru_cache(maxsize=1)
def _schema() -> dict[str, Any]:
    return InferenceServiceSpec.model_json_schema(by_alias=True)


def random_text(rng: random.Random, pattern: str, longest: int) -> str:
    """Return a text that matches the pattern, at most `longest` characters."""
    for _ in range(50):
        text = "".join(_pieces(rng, sre_parser.parse(pattern)))
        if len(text) <= longest:
            assert re.search(pattern, text), (pattern, text)
            return text
    raise AssertionError(f"no text of at most {longest} characters for {pattern}")


def _pieces(rng: random.Random, parsed: Any) -> Iterator[str]:
    for op, argument in parsed:
        if op is sre.LITERAL:
            yield chr(argument)
        elif op is sre.IN:
            yield _one_of(rng, argument)
        elif op is sre.BRANCH:
            yield from _pieces(rng, rng.choice(argument[1]))
        elif op is sre.SUBPATTERN:
            yield from _pieces(rng, argument[3])
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, inner = argument
            for _ in range(rng.randint(low, min(int(high), low + 8))):
                yield from _pieces(rng, inner)
        elif op is not sre.AT:
            raise AssertionError(f"cannot draw from {op}")


def _one_of(rng: random.Random, choices: Any) -> str:
    op, argument = rng.choice([choice for choice in choices if choice[0] is not sre.NEGATE])
    return chr(argument) if op is sre.LITERAL else chr(rng.randint(*argument))


def _draw(rng: random.Random, schema: dict[str, Any], key: str) -> Any:
    if "$ref" in schema:
        return _draw(rng, _schema()["$defs"][schema["$ref"].rsplit("/", 1)[1]], key)
    if "oneOf" in schema:
        return _draw(rng, rng.choice(schema["oneOf"]), key)
    if "anyOf" in schema:
        return _draw(rng, next(way for way in schema["anyOf"] if way.get("type") != "null"), key)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    draw: dict[str, Callable[[], Any]] = {
        "boolean": lambda: rng.random() < 0.5,
        "integer": lambda: _integer(rng, schema),
        "string": lambda: _string(rng, schema, key),
        "array": lambda: _array(rng, schema, key),
        "object": lambda: _object(rng, schema, key),
    }
    return draw[schema["type"]]()


def _integer(rng: random.Random, schema: dict[str, Any]) -> int:
    low, high = schema["minimum"], schema["maximum"]
    return int(rng.choice((low, high, rng.randint(low, high), min(high, low + rng.randint(0, 9)))))


def _string(rng: random.Random, schema: dict[str, Any], key: str) -> str | int:
    if key in QUANTITIES:
        return rng.choice(QUANTITIES[key])
    if "pattern" in schema:
        return random_text(rng, schema["pattern"], schema.get("maxLength", 253))
    return "".join(rng.choice("abc xyz-.:/") for _ in range(rng.randint(0, 12)))


def _array(rng: random.Random, schema: dict[str, Any], key: str) -> list[Any]:
    if key == "env":
        return _environment(rng)
    low = schema.get("minItems", 0)
    return [
        _draw(rng, schema["items"], key)
        for _ in range(rng.randint(low, min(schema.get("maxItems", 4), low + 2)))
    ]


def _object(rng: random.Random, schema: dict[str, Any], key: str) -> dict[str, Any]:
    if "properties" not in schema:
        return _map(rng, schema["additionalProperties"], key)
    required = schema.get("required", ())
    return {
        name: _draw(rng, inner, name)
        for name, inner in schema["properties"].items()
        if name in required or rng.random() < 0.4
    }


def _map(rng: random.Random, values: dict[str, Any], key: str) -> dict[str, str]:
    if key == "options":
        return _options(rng)
    return {name: _draw(rng, values, "") for name in rng.sample(KEYS, rng.randint(0, 3))}


def _environment(rng: random.Random) -> list[dict[str, Any]]:
    reference = {"secretKeyRef": {"name": "proxy", "key": "url"}}
    return [
        {"name": name, "valueFrom": reference}
        if name == "HTTPS_PROXY" and rng.random() < 0.5
        else {"name": name, "value": ENVIRONMENT[name]}
        for name in rng.sample(sorted(ENVIRONMENT), rng.randint(0, 3))
    ]


def _options(rng: random.Random) -> dict[str, str]:
    chosen = {
        name: rng.choice(ALLOWED[name].takes.examples())
        for name in rng.sample(sorted(ALLOWED), rng.randint(0, 5))
    }
    return chosen if not option_errors(chosen) else {}


def random_spec(rng: random.Random) -> dict[str, Any]:
    """Return a spec within the schema. Most also meet the rules between fields."""
    spec: dict[str, Any] = _draw(rng, _schema(), "")
    spec["model"].pop("credentialsSecret", None)
    for part in (spec["model"], *spec["model"].get("adapters", ())):
        part.pop("revision", None)
        part["source"] = _mended_source(rng, part["source"])
        if part["source"].startswith("hf://"):
            part["revision"] = f"{rng.getrandbits(160):040x}"
    spec.pop("serviceAccountName", None)  # the default settings allow none
    _mend_cache(rng, spec["model"])
    resources = spec.get("resources", {})
    for claim in resources.get("claims", ()):
        claim.pop("resourceClaimTemplateName", None)
        claim["resourceClaimName"] = "devices"
    if "accelerator" in resources:
        parallel = spec.setdefault("engine", {}).setdefault("tensorParallelSize", 1)
        resources["accelerator"]["count"] = parallel
    if spec.get("scaling", {}).get("mode") == "External":
        spec.setdefault("replicas", 2)
    policy = spec.get("networkPolicy", {})
    _mend_network(rng, policy)
    _mend_service(spec.get("service", {}))
    _mend_metadata(spec.get("podMetadata", {}))
    _mend_bounds(spec)
    _mend_tolerations(spec.get("placement", {}))
    _mend_spread(spec.get("placement", {}))
    _mend_requirements([spec.get("placement", {}).get("affinity"), policy])
    _mend_node_fields(spec.get("placement", {}).get("affinity"))
    return spec


def _mended_source(rng: random.Random, source: str) -> str:
    """Return a claim instead of object storage, which the default profiles do not have."""
    if source.startswith("s3://"):
        return f"pvc://{rng.choice('abc')}/{rng.getrandbits(32):x}"
    return source


def _mend_service(section: dict[str, Any]) -> None:
    """ClusterIP, because the default settings allow no other type."""
    section.pop("type", None)
    section.pop("loadBalancerClass", None)


def _mend_metadata(section: dict[str, Any]) -> None:
    """Names without a domain, and the harmless ones of Kubernetes: the default settings allow no other."""
    for kind, names in section.items():
        section[kind] = {
            name if is_allowed(name, ()) else f"renamed-{number}": value
            for number, (name, value) in enumerate(names.items())
        }


def _mend_network(rng: random.Random, policy: dict[str, Any]) -> None:
    if policy.get("preset") == "Namespaces":
        policy.setdefault("namespaceSelector", {})
    else:
        policy.pop("namespaceSelector", None)
    for peer in policy.get("peers", ()):
        if not peer:
            peer[rng.choice(("podSelector", "namespaceSelector"))] = {}
    if "cidrs" in policy:
        # Copies, because callers may spoil what they get.
        policy["cidrs"] = deepcopy(rng.sample(CIDRS, rng.randint(0, len(CIDRS))))


def _mend_cache(rng: random.Random, model: dict[str, Any]) -> None:
    sources = [model["source"], *(adapter["source"] for adapter in model.get("adapters", ()))]
    if not any(source.startswith("hf://") for source in sources):
        model.pop("cache", None)
        model.pop("tokenSecret", None)
    cache = model.get("cache")
    if cache is not None and len(cache) != 1:
        model["cache"] = rng.choice(({"claimName": "hub-cache"}, {"ephemeralSize": "100Gi"}))


def _mend_bounds(spec: dict[str, Any]) -> None:
    scaling = spec.get("scaling", {})
    low, high = scaling.get("minReplicas", 1), scaling.get("maxReplicas", 8)
    if low > high:
        scaling["minReplicas"], scaling["maxReplicas"] = high, low
    spec.get("breaker", {}).pop("fallbackReplicas", None)
    batching = spec.get("batching")
    if batching is not None:
        batching["maxSequences"] = max(
            batching.get("maxSequences", 256), batching.get("minSequences", 4)
        )
        batching["maxTokens"] = max(
            batching.get("maxTokens", 8192),
            batching.get("minTokens", 256),
            batching["maxSequences"],
        )
    batch = spec.get("tiers", {}).get("batch", {})
    if batch.get("floorPercent", 5) > batch.get("sharePercent", 30):
        batch["floorPercent"] = batch["sharePercent"] = batch.get("floorPercent", 30)
    rollout = spec.get("rollout", {})
    if str(rollout.get("maxSurge", 1)) in {"0", "0%"}:
        rollout["maxUnavailable"], rollout["strategy"] = 1, "Replace"
    if rollout.get("strategy") == "Swap":
        spec["access"] = "Gateway"


def _mend_tolerations(placement: dict[str, Any]) -> None:
    for taint in placement.get("tolerations", ()):
        if "key" not in taint or taint.get("operator") == "Exists":
            taint["operator"] = "Exists"
            taint.pop("value", None)
        if taint.get("effect") != "NoExecute":
            taint.pop("tolerationSeconds", None)


def _mend_spread(placement: dict[str, Any]) -> None:
    for constraint in placement.get("topologySpreadConstraints", ()):
        if "minDomains" in constraint:
            constraint["whenUnsatisfiable"] = "DoNotSchedule"


def _mend_requirements(value: Any) -> None:
    for requirement in _requirements(value):
        operator = requirement["operator"]
        if operator in ("Exists", "DoesNotExist"):
            requirement.pop("values", None)
        elif operator in ("Gt", "Lt"):
            requirement["values"] = ["7"]
        elif not requirement.get("values"):
            requirement["values"] = ["a"]


def _mend_node_fields(value: Any) -> None:
    if isinstance(value, dict):
        for field in value.get("matchFields", ()):
            field.update(key="metadata.name", operator="In", values=["node-a"])
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            _mend_node_fields(inner)


def _requirements(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "operator" in value and "key" in value:
            yield value
        for inner in value.values():
            yield from _requirements(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _requirements(inner)


def service_manifest(
    spec: dict[str, Any], *, name: str = "chat", namespace: str = "team-a", uid: str = "uid-chat"
) -> dict[str, Any]:
    """Return an InferenceService with this spec."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": namespace, "uid": uid, "generation": 1},
        "spec": spec,
    }


def random_services(seed: int, count: int) -> Iterator[InferenceService]:
    """Yield `count` services that the API, the default profiles and settings accept.

    A third of the specs also ask for a dangerous label or annotation.
    """
    rng = random.Random(seed)
    found = tried = 0
    while found < count:
        tried += 1
        assert tried < 20 * count + 200, f"only {found} of {tried} random specs are valid"
        name = random_text(rng, "^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$", 50)
        try:
            spec = random_spec(rng)
            add_dangerous(rng, spec)
            service = parse_service(service_manifest(spec, name=name))
        except InvalidService:
            continue
        if allowed(service, PROFILE):
            found += 1
            yield service


def allowed(service: InferenceService, profile: EngineProfile) -> bool:
    """Return True if the profile and the default settings accept the spec, and an engine the names."""
    engine, model = service.spec.engine, service.spec.model
    if any(adapter.name == (model.served_name or service.name) for adapter in model.adapters):
        return False
    refused = refusals(service.spec, profile, CONTEXT)
    if any(error.path.startswith("spec.podMetadata.") for error in refused):
        return False
    return not option_errors(engine.options, profile.options) and all(
        map(profile.allows_variable, engine.env)
    )
