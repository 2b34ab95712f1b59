"""L0: the InferenceService as frozen values. No I/O, no clock."""
