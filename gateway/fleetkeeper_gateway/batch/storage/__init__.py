"""Files, batches and results as objects: in a bucket, in a directory that processes share, or in one's own.

`create_storage` is the way in. `paths` has the names of all objects.
"""

from fleetkeeper_gateway.batch.storage.errors import BrokenObject, StoreRefused
from fleetkeeper_gateway.batch.storage.stores import Storage, create_storage

__all__ = ["BrokenObject", "Storage", "StoreRefused", "create_storage"]
