"""The InferenceService as frozen values: layer 0, without I/O or a clock."""
