"""Files, batches and results as objects: in a bucket, in a shared directory, or in a directory of one process.

`create_storage` is the entry point. `paths` defines the names of all objects.
"""

from fleetkeeper_gateway.batch.storage.errors import BrokenObject, StoreRefused
from fleetkeeper_gateway.batch.storage.stores import Storage, create_storage

__all__ = ["BrokenObject", "Storage", "StoreRefused", "create_storage"]
