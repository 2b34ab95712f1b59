"""/v1/files and /v1/batches, as OpenAI's clients call them."""

from fleetkeeper_gateway.batch.api.application import create_app
from fleetkeeper_gateway.batch.api.parts import ApiParts

__all__ = ["ApiParts", "create_app"]
