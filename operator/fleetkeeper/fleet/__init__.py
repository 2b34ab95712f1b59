"""The fleet as its users see it: services, gauges of the operator, and both in words."""
