"""Keys of clients: one labelled Secret per key, in a namespace that holds nothing else.

The Secret holds a digest of the key, never the key. `fleetkeeper keys` writes it, or a manifest.
"""

KEY_LABEL = "fleetkeeper.io/client-key"
"""Label of the Secret, with the value `true`."""
KEY_SECRET_TYPE = "fleetkeeper.io/client-key"  # noqa: S105 - a type, no secret
KEY_PREFIX = "fk_"
"""First characters of a key, so that scanners of leaked secrets can find it."""
KEY_BYTES = 32
"""Random bytes of a key. They follow the prefix in base64url without padding."""

# Entries of the Secret's data. Lists are comma-separated; an absent entry has the default.
DIGEST = "sha256"
"""SHA-256 of the whole key with its prefix, in hexadecimal. While the key rotates two, comma-separated:
the old one first."""
OLD_UNTIL = "oldUntil"
"""RFC 3339 time until which the first of two digests is accepted. Absent: until it is removed."""
NAME = "name"
"""Name for people. The key's ID is the name of the Secret."""
NAMESPACES = "namespaces"
"""Namespaces whose services the key may use: names, without patterns."""
MODELS = "models"
"""Globs of model names within these namespaces. Default: *."""
HIGHEST_TIER = "highestTier"
"""realtime, standard or batch. Default: standard."""
EXPIRES = "expires"
"""RFC 3339 time. Absent: never."""
REQUESTS_PER_MINUTE = "requestsPerMinute"
TOKENS_PER_MINUTE = "tokensPerMinute"
CONCURRENCY = "concurrency"
"""Limits for each tier: `100`, or `realtime=20,standard=100`. A tier that is not listed has no limit."""

ANONYMOUS = "anonymous"
"""ID of the key with which a gateway without keys counts and limits every client."""
