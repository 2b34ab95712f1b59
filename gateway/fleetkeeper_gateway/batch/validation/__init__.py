"""Checks of input files. A file is read in a process of its own, so that the event loop is not blocked.

    validator   starts the process, for the batch process
    worker      the process

Nothing is imported here: the process starts for each file, and needs a fifth of what `validator` does.
"""
