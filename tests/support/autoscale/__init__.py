"""Doubles and inputs for tests of the control loop."""
