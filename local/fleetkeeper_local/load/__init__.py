"""Load for an OpenAI-compatible address: an open-loop generator, a patient client, and a summary.

Open loop: a request is sent when its time has come, whatever became of those before it, and every
latency counts from the moment it *should* have been sent (else a stalled server hides its own
stall: "coordinated omission").
"""
