"""The operator's reads and writes in Kubernetes, on top of `fleetkeeper_kube`.

`credentials` loads a ServiceAccount or a kubeconfig, `refusals` maps failed writes to the planner's
problems, `writes` contains all writes (and the fence and the hook that each passes), `reflector` watches
our objects, `records` and `fields` turn live objects into what decisions need, `lease` elects the leader.
"""
