"""Envoy's configuration: requests pass as bytes, to a replica that can take them.

What each part is for is in docs/adr/0044-envoy-as-the-router.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fleetkeeper_router.errors import FLAGS, local_replies
from fleetkeeper_router.settings import Policy, Settings

Config = dict[str, Any]

SESSION_HEADER: Final = "x-session-id"
PREFIX_HEADER: Final = "x-fleetkeeper-prefix"
"""Key of a request for PrefixAware. Without it, the beginning of the body is the key."""
PREFIX_BYTES: Final = 1024
ENGINES: Final = "engines"
READY_PATH: Final = "/readiness"
STARTED_PATH: Final = "/startup"
METRICS_PATH: Final = "/metrics"
_TYPES: Final = "type.googleapis.com/envoy"
_KEEP_ALIVE_S: Final = 3
"""Engines of earlier releases close an idle connection after 5 s. A request that meets that end may have been received."""
_CHOICES: Final = 3
"""Replicas of which the least loaded one is chosen. With 2, a slow one of four gets more."""
_BALANCE_PERCENT: Final = 150
"""A replica with more than 1.5 times the mean load gives keys of its own to neighbors."""
_READ_BYTES: Final = 1_048_576
"""A longer body is not read for its key, and one without a length neither."""
_KEPT_BYTES: Final = 262_144
"""A request with a longer body is sent once, and never again."""
_DNS_S: Final = 3
_HANG_S: Final = 60
"""Time after which a hung thread ends Envoy, and the pod starts it again."""
_KEY_OF_BODY: Final = f"""
function envoy_on_request(handle)
  local length = tonumber(handle:headers():get("content-length")) or math.huge
  if length <= {_READ_BYTES} and handle:headers():get("{PREFIX_HEADER}") == nil then
    local body = handle:body()
    if body ~= nil and body:length() > 0 then
      local some = body:getBytes(0, math.min({PREFIX_BYTES}, body:length()))
      -- What was asked for before the body came is not valid any more.
      handle:headers():add("{PREFIX_HEADER}", handle:base64Escape(some))
    end
  end
end
"""


def bootstrap(settings: Settings) -> Config:
    """Return the configuration of Envoy."""
    return {
        "node": {"id": "router", "cluster": "fleetkeeper"},
        "admin": {"address": {"pipe": {"path": settings.admin_socket}}},
        "static_resources": {
            "listeners": [_requests(settings), _metrics(settings)],
            "clusters": [_engines(settings), _admin(settings)],
        },
        "stats_config": {
            "stats_matcher": {
                "inclusion_list": {"patterns": [{"prefix": prefix} for prefix in _SHOWN]}
            }
        },
        "overload_manager": _overload(settings),
        "watchdogs": {
            thread: {"kill_timeout": f"{_HANG_S}s"}
            for thread in ("main_thread_watchdog", "worker_watchdog")
        },
    }


_SHOWN: Final = (
    f"cluster.{ENGINES}.membership_",
    f"cluster.{ENGINES}.upstream_cx_",
    f"cluster.{ENGINES}.upstream_rq_",
    f"cluster.{ENGINES}.lb_",
    f"cluster.{ENGINES}.health_check.",
    f"cluster.{ENGINES}.update_",
    "http.requests.downstream_cx_",
    "http.requests.downstream_rq_",
    "overload.",
    "server.live",
    "server.memory_",
    "server.state",
    "server.uptime",
)
"""Beginnings of the names of metrics. None has a series for each replica."""


# -- requests ----------------------------------------------------------------------------------------


def _requests(settings: Settings) -> Config:
    filters = [_health_filter("ready", READY_PATH), _started_filter()]
    if settings.policy is Policy.PREFIX_AWARE:
        code = {"inline_string": _KEY_OF_BODY}
        filters.append(
            _typed("lua", "extensions.filters.http.lua.v3.Lua", default_source_code=code)
        )
    filters.append(
        _typed("router", "extensions.filters.http.router.v3.Router", suppress_envoy_headers=True)
    )
    idle = _seconds(settings.request_timeout_seconds)
    manager = _typed(
        "requests",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="requests",
        # What a client sends is what an engine receives, but for headers of the connection.
        generate_request_id=False,
        preserve_external_request_id=True,
        server_header_transformation="PASS_THROUGH",
        skip_xff_append=True,
        proxy_100_continue=True,
        http_protocol_options={
            "header_key_format": {
                "stateful_formatter": _typed(
                    "case",
                    "extensions.http.header_formatters.preserve_case.v3.PreserveCaseFormatterConfig",
                )
            }
        },
        codec_type="HTTP1",
        stream_idle_timeout=idle,
        request_headers_timeout="60s",
        access_log=[_log_of_failures()],
        local_reply_config=local_replies(),
        http_filters=filters,
        route_config={
            "virtual_hosts": [
                {
                    "name": "engines",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": _route(settings),
                            "request_body_buffer_limit": _KEPT_BYTES,
                            # By this header an engine forbids another try. Clients do not need it.
                            "response_headers_to_remove": ["x-envoy-ratelimited"],
                        }
                    ],
                }
            ],
        },
    )
    return {
        "name": "requests",
        "address": _address(settings.host, settings.port),
        "per_connection_buffer_limit_bytes": _READ_BYTES,
        "filter_chains": [{"filters": [manager]}],
    }


def _log_of_failures() -> Config:
    """Return a log of what the router answered itself, or cut."""
    line = {
        "time": "%START_TIME%",
        "level": "warning",
        "event": "request failed",
        "status": "%RESPONSE_CODE%",
        "flags": "%RESPONSE_FLAGS%",
        "reason": "%RESPONSE_CODE_DETAILS%",
        "engine": "%UPSTREAM_HOST%",
        "tries": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
        "milliseconds": "%DURATION%",
        "method": "%REQ(:METHOD)%",
        "request": "%REQ(X-REQUEST-ID)%",
    }
    log = _typed(
        "failures",
        "extensions.access_loggers.stream.v3.StdoutAccessLog",
        log_format={"json_format": line},
    )
    return {**log, "filter": {"response_flag_filter": {"flags": list(FLAGS)}}}


def _health_filter(name: str, path: str, **fields: object) -> Config:
    match = {"name": ":path", "string_match": {"exact": path}}
    return _typed(
        name,
        "extensions.filters.http.health_check.v3.HealthCheck",
        pass_through_mode=False,
        headers=[match],
        **fields,
    )


def _started_filter() -> Config:
    """Return what answers whether an engine is ready. Once one was, `READY_PATH` alone counts."""
    least = {ENGINES: {"value": 1}}  # percent; Envoy takes less for none at all
    return _health_filter("started", STARTED_PATH, cluster_min_healthy_percentages=least)


def _route(settings: Settings) -> Config:
    keys = {
        Policy.SESSION_AFFINITY: SESSION_HEADER,
        Policy.PREFIX_AWARE: PREFIX_HEADER,
    }
    route: Config = {
        "cluster": ENGINES,
        "timeout": "0s",
        "idle_timeout": _seconds(settings.request_timeout_seconds),
        "retry_policy": {
            # Only what no engine works on: it could not be sent, or the engine refused it.
            "retry_on": "connect-failure,retriable-status-codes",
            "retriable_status_codes": [429],
            "num_retries": 3,
            "retry_back_off": {"base_interval": "0.02s", "max_interval": "0.1s"},
            "retry_host_predicate": [
                _typed(
                    "previous_hosts",
                    "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate",
                )
            ],
            "host_selection_retry_max_attempts": 64,
        },
    }
    if settings.policy in keys:
        route["hash_policy"] = [{"header": {"header_name": keys[settings.policy]}}]
    return route


# -- replicas ----------------------------------------------------------------------------------------


def _engines(settings: Settings) -> Config:
    endpoint = {
        "address": _address(settings.engines, settings.engine_port),
        "health_check_config": {"port_value": settings.health_port},
    }
    return {
        "name": ENGINES,
        "cluster_type": _typed(
            "envoy.cluster.dns", "extensions.clusters.dns.v3.DnsCluster", **_dns(settings)
        ),
        "connect_timeout": "2s",
        "load_assignment": {
            "cluster_name": ENGINES,
            "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}],
        },
        "health_checks": [
            {
                # On a busy node a replica may need seconds to answer, and without replicas all fails.
                # One that says that it is not ready is left out at once.
                "timeout": "3s",
                "interval": "1s",
                "no_traffic_interval": "1s",
                "interval_jitter_percent": 10,
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/healthz/ready"},
            }
        ],
        "circuit_breakers": {"thresholds": [_bounds(settings)]},
        "typed_extension_protocol_options": _upstream_protocol(settings),
        "per_connection_buffer_limit_bytes": _READ_BYTES,
        **_balance(settings.policy),
    }


def _dns(settings: Settings) -> Config:
    host, _, port = settings.resolver.rpartition(":")
    servers = {"resolvers": [_address(host, int(port))]} if settings.resolver else {}
    return {
        # A new replica has its address long before it is ready.
        "dns_refresh_rate": f"{_DNS_S}s",
        # The default asks for IPv6 addresses first, once for each domain of the search list.
        "dns_lookup_family": "V4_PREFERRED",
        "dns_failure_refresh_rate": {"base_interval": "1s", "max_interval": "2s"},
        "typed_dns_resolver_config": _typed(
            "resolver", "extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig", **servers
        ),
    }


def _balance(policy: Policy) -> Config:
    common: Config = {
        # By default, replicas that are not ready get requests once half of them are not.
        "healthy_panic_threshold": {"value": 0.0},
        "ignore_new_hosts_until_first_hc": True,
    }
    if policy is Policy.ROUND_ROBIN:
        return {"common_lb_config": common, "lb_policy": "ROUND_ROBIN"}
    if policy is Policy.LEAST_LOADED:
        return {
            "common_lb_config": common,
            "lb_policy": "LEAST_REQUEST",
            "least_request_lb_config": {"choice_count": _CHOICES},
        }
    common["consistent_hashing_lb_config"] = {"hash_balance_factor": _BALANCE_PERCENT}
    return {
        "common_lb_config": common,
        # A table of addresses is the same on all routers, and after a restart. Envoy's ring has more
        # places for each replica if there are fewer, so its keys also move between those that stay.
        "lb_policy": "MAGLEV",
    }


def _bounds(settings: Settings) -> Config:
    many = 2 * settings.connections
    return {
        "max_connections": many,
        "max_pending_requests": many,
        "max_requests": many,
        # A full replica is the least loaded, so most requests may have to be sent again.
        "max_retries": many,
    }


def _upstream_protocol(settings: Settings) -> Config:
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    options: Config = {
        "@type": f"{_TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "common_http_protocol_options": {"idle_timeout": f"{_KEEP_ALIVE_S}s"},
        "explicit_http_config": {
            "http_protocol_options": {
                "header_key_format": {
                    "stateful_formatter": _typed(
                        "case",
                        "extensions.http.header_formatters.preserve_case.v3.PreserveCaseFormatterConfig",
                    )
                }
            }
        },
    }
    if settings.policy is Policy.PREFIX_AWARE:
        mutations = {"request_mutations": [{"remove": PREFIX_HEADER}]}
        options["http_filters"] = [
            _typed(
                "header_mutation",
                "extensions.filters.http.header_mutation.v3.HeaderMutation",
                mutations=mutations,
            ),
            _typed("codec", "extensions.filters.http.upstream_codec.v3.UpstreamCodec"),
        ]
    return {name: options}


# -- the router itself -------------------------------------------------------------------------------


def _metrics(settings: Settings) -> Config:
    route = {
        "match": {"path": METRICS_PATH},
        "route": {"cluster": "admin", "prefix_rewrite": "/stats/prometheus"},
    }
    manager = _typed(
        "metrics",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="metrics",
        codec_type="HTTP1",
        http_filters=[_typed("router", "extensions.filters.http.router.v3.Router")],
        route_config={"virtual_hosts": [{"name": "metrics", "domains": ["*"], "routes": [route]}]},
    )
    return {
        "name": "metrics",
        "address": _address(settings.host, settings.metrics_port),
        "filter_chains": [{"filters": [manager]}],
        # Scrapes continue while clients use all their connections.
        "ignore_global_conn_limit": True,
    }


def _admin(settings: Settings) -> Config:
    endpoint = {"address": {"pipe": {"path": settings.admin_socket}}}
    return {
        "name": "admin",
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": "admin",
            "endpoints": [{"lb_endpoints": [{"endpoint": endpoint}]}],
        },
    }


def _overload(settings: Settings) -> Config:
    """Return what Envoy refuses before its pod is out of memory or descriptors."""
    heap, connections = (
        "envoy.resource_monitors.fixed_heap",
        "envoy.resource_monitors.global_downstream_max_connections",
    )
    return {
        "refresh_interval": "0.25s",
        "resource_monitors": [
            _typed(
                heap,
                "extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig",
                max_heap_size_bytes=settings.heap_bytes,
            ),
            _typed(
                connections,
                "extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                max_active_downstream_connections=settings.connections,
            ),
        ],
        "actions": [
            _action("shrink_heap", heap, 0.9),
            _action("stop_accepting_requests", heap, 0.95),
        ],
    }


def _action(name: str, monitor: str, share: float) -> Config:
    triggers = [{"name": monitor, "threshold": {"value": share}}]
    return {"name": f"envoy.overload_actions.{name}", "triggers": triggers}


def _typed(name: str, kind: str, **fields: object) -> Config:
    return {"name": name, "typed_config": {"@type": f"{_TYPES}.{kind}", **fields}}


def _address(host: str, port: int) -> Mapping[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _seconds(value: float) -> str:
    return f"{value:g}s"
