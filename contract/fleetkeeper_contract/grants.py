"""Grants: what the gateway signs for one request, and what an engine demands.

A grant is a compact JWT, EdDSA (Ed25519), with `typ` and `kid` in its header. Routers drop
`Authorization` on some paths, so the gateway sends the grant in two places: as a bearer token, and
as an entry of W3C Baggage. An engine accepts either.
"""

GRANT_TYPE = "fleetkeeper-grant+jwt"
"""Header `typ` of a grant. No other token has it, so none can be taken for a grant."""
GRANT_ISSUER = "fleetkeeper-gateway"
"""Claim `iss`."""
GRANT_MAX_SECONDS = 60
"""Longest time from `iat` to `exp`."""
GRANT_LEEWAY_SECONDS = 5
"""Accepted difference between the clocks of two machines."""
GRANT_BAGGAGE_KEY = "fleetkeeper-grant"
"""Key of the entry in the header `baggage`."""
MAX_GRANT_BYTES = 2048

SERVICE_CLAIM = "aud"
"""UID of the InferenceService."""
ATTEMPT_CLAIM = "jti"
"""ID of one attempt to send the request. An engine accepts it once."""
REQUEST_CLAIM = "rid"
"""ID of the request, the same in each attempt."""
TIER_CLAIM = "tier"
KEY_CLAIM = "key"
"""ID of the client's key. `anonymous` if the gateway serves without keys."""
HOPS_CLAIM = "hops"
"""Number of gateways that the request passed, this one included."""
MAX_HOPS = 3

GRANTS_FILE = "grants.json"
"""File beside the control keys: {"demanded": bool, "service": UID, "keys": [public JWKs]}."""
MAX_GRANT_KEYS = 3

USAGE_TYPE = "fleetkeeper-usage+jwt"
"""Header `typ` of the token that reads an engine's usage. `aud` is the pod's UID, `exp` as a grant's."""
USAGE_PATH = "/v1/usage"
"""Path on the engine's control port: GET ?boot=ID&after=NUMBER."""

# Entries of the Secret with the grant keys, as the gateway mounts it. The operator mounts the JWKS alone.
SIGNING_FILE = "signing.pem"
"""Private key in force (PKCS 8, PEM)."""
GRANT_JWKS_FILE = "jwks.json"
"""Public keys that engines trust, at most MAX_GRANT_KEYS."""
NEXT_FILE = "next.pem"
"""During a rotation: the private key that follows."""
SIGN_FROM_FILE = "signFrom"
"""During a rotation: when the gateway changes to it (RFC 3339)."""

BATCH_TYPE = "fleetkeeper-batch+jwt"
"""Header `typ` of the bearer token with which the batch process asks the gateway on behalf of a key.

Claims: `iss` BATCH_ISSUER, `aud` BATCH_AUDIENCE, `key` the key's ID, `iat`, and `exp` at most
GRANT_MAX_SECONDS later. The key that signs grants signs it. The gateway accepts it in tier batch alone,
and only while the key is in force.
"""
BATCH_ISSUER = "fleetkeeper-batch"
BATCH_AUDIENCE = "fleetkeeper-gateway"

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
