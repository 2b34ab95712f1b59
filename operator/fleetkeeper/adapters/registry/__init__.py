"""Container registries: names, logins, the HTTP API, and copies from one registry to another."""
