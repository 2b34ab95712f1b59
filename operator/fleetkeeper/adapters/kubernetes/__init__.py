"""The Kubernetes API: reads, writes under one field manager, watches, and the leader's lease.

`client` speaks HTTP, `errors` gives failures a meaning, `writes` holds every write there is (and the
fence and the hook that all pass), `reflector` keeps a kind in view, `records` and `fields` turn live
objects into what decisions need, `lease` elects the leader.
"""
