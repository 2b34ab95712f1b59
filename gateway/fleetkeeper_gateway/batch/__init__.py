"""The process `batch`: OpenAI's Batch API. Files are the truth; Redis holds what can be rebuilt from them.

`interfaces` says what the parts know of one another, `model` what they exchange:

    api         /v1/files and /v1/batches
    storage     objects: files, batches, results (obstore)
    validation  reads an input file in a process of its own
    queue       streams, leases, commits and fairness in Redis, and their reconstruction
    workers     send lines, write segments, finalize batches
"""
