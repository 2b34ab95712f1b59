"""The router of a service: Envoy, configured from a few variables of the environment."""
