"""The Kubernetes API: reads, writes under one field manager, watches, and the leader lease.

`client` speaks HTTP, `errors` classifies failures, `writes` contains all writes (and the fence and the
hook that each passes), `reflector` lists and watches a kind, `records` and `fields` turn live objects
into what decisions need, `lease` elects the leader.
"""
