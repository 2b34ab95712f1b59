"""The keys of clients, from the labelled Secrets of one namespace."""

from fleetkeeper_gateway.keys.anonymous import AnonymousKeys
from fleetkeeper_gateway.keys.settings import KeysSettings
from fleetkeeper_gateway.keys.watched import WatchedKeys, create_keys

__all__ = ["AnonymousKeys", "KeysSettings", "WatchedKeys", "create_keys"]
