"""From samples of pods to the signals of a service."""
