"""Requests for services that sleep or swap: held until a replica takes them, while a wake mark asks for one."""

from fleetkeeper_gateway.hold.hold import Hold, create_hold
from fleetkeeper_gateway.hold.settings import HoldSettings

__all__ = ["Hold", "HoldSettings", "create_hold"]
