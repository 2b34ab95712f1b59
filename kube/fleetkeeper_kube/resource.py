"""A resource of the Kubernetes API and its paths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resource:
    """A namespaced resource of the Kubernetes API."""

    kind: str
    plural: str
    version: str
    group: str = ""

    @property
    def api_version(self) -> str:
        """The apiVersion of manifests: `apps/v1`, or `v1` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Return the path of the collection, an object, or its subresource. None: all namespaces."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(parts)
