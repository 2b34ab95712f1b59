"""The rules of a tick: limits, replicas, admission, breakers and remedies."""
