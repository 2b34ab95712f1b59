"""Validation of input files, each in a process of its own, so that the event loop is not blocked.

    validator   starts the process, for the batch process
    worker      the process

This module imports nothing: the process starts for each file, and needs a fifth of `validator`'s imports.
"""
