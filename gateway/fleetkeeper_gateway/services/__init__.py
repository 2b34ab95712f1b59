"""The services that requests may go to, from the InferenceServices of the cluster."""

from fleetkeeper_gateway.services.settings import ServicesSettings
from fleetkeeper_gateway.services.watched import WatchedServices, create_services

__all__ = ["ServicesSettings", "WatchedServices", "create_services"]
