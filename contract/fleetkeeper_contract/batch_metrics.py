"""Metrics of the batch process that the operator reads: what waits for a service, and until when.

Only the process that holds the lease exports them, so that replicas do not add up. The labels name the
InferenceService that serves the model of the batch. They are not `namespace` and `service`, because
Prometheus gives these names to the scraped pod's own. Without batches a service has no series.
"""

NAMESPACE_LABEL = "service_namespace"
"""Label with the namespace of the InferenceService."""
SERVICE_LABEL = "inference_service"
"""Label with its name."""
BACKLOG_TOKENS = "fleetkeeper_batch_backlog_tokens"
"""Estimated tokens (prompt and answer) of all lines without a result."""
DEADLINE = "fleetkeeper_batch_deadline_timestamp_seconds"
"""Unix seconds: the earliest end of a completion window."""
REQUIRED_RATE = "fleetkeeper_batch_required_tokens_per_second"
"""Least rate that meets every deadline: max over deadlines d of (tokens due by d) / (d - now)."""
REMAINING_LINES = "fleetkeeper_batch_remaining_lines"
"""Lines without a result."""
