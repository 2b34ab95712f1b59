"""Headers of inference requests."""

TIER_HEADER = "X-Inference-Tier"
REQUEST_ID_HEADER = "X-Request-Id"
"""The same ID again is a retry, which is not counted as another arrival."""
REFUSED_HEADER = "X-Fleetkeeper-Refused"
"""On an answer that the gateway gave itself: the code of its error. No answer of a service has it."""
