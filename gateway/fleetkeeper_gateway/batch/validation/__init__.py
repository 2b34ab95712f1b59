"""Checks of input files. A file is read in a process of its own, so that the event loop is not blocked."""

from fleetkeeper_gateway.batch.validation.validator import Validator

__all__ = ["Validator"]
