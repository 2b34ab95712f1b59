"""Bounds on the cost of a client's connection and its bytes before a request is accepted."""
