"""One address for every InferenceService: keys, limits, grants and usage."""
