"""The process part of a reconcile: the controller, and the executor of its plans."""
