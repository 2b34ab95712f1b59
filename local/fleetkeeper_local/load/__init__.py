"""Load for an OpenAI-compatible address: an open-loop generator, a patient client, and a summary.

Open loop: each request is sent at its time, regardless of the requests before it, and its latency
counts from the time at which it *should* have been sent. Otherwise a stalled server hides its own
stall ("coordinated omission").
"""
