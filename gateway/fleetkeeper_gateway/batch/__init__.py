"""The process `batch`: OpenAI's Batch API. Files are the truth; Redis holds what can be rebuilt from them.

`interfaces` defines how the parts call one another, `model` the values that they exchange:

    api         /v1/files and /v1/batches
    storage     objects: files, batches, results (obstore)
    validation  checks an input file in a process of its own
    queue       streams, leases, commits and fairness in Redis, and their reconstruction
    workers     send lines, write segments, finalize batches
"""
