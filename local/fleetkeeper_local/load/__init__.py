"""Load for an OpenAI-compatible address: a patient client, open and closed loops, and a summary.

Open loop: each request is sent at its time, regardless of the requests before it, and its latency
counts from the time at which it *should* have been sent. Otherwise a stalled server hides its own
stall ("coordinated omission").
"""
