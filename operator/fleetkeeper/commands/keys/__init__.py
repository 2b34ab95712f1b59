"""Commands about keys of the gateway and of those who sign, and the usage of keys."""
