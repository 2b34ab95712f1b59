"""The gateway's pods, as NetworkPolicies and the operator name them."""

GATEWAY_POD_LABELS = {
    "app.kubernetes.io/name": "fleetkeeper",
    "app.kubernetes.io/component": "gateway",
}
"""Labels of the gateway's pods, which run in the operator's namespace."""
USAGE_POD_LABELS = {
    "app.kubernetes.io/name": "fleetkeeper",
    "app.kubernetes.io/component": "gateway-usage",
}
"""Labels of the pod that collects usage from the engines' control ports."""
