"""The request path: clients' requests and their answers."""
