"""Access to the Kubernetes API for the operator and the gateway: requests, lists and watches.

Everything that the API server sends is bounded in bytes and time, and its objects may be anything.
`client` speaks HTTP, `errors` classifies failures, `bounds` replaces objects that are not read,
`reading` reads fields of live objects, `reflector` lists and watches a resource.
"""
