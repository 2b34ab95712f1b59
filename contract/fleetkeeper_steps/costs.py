"""The time of a step."""

from __future__ import annotations

from typing import NamedTuple


class StepCosts(NamedTuple):
    """The cost of a step in seconds, overheads included.

    `t0_s` and `w_s` per step, `g_s` per token, `b_s` per decoding sequence, `c_s` per resident KV token,
    `q_s` per pair of a prefill token and a token before it, `request_s` per request that starts.
    """

    t0_s: float
    w_s: float
    g_s: float
    b_s: float
    c_s: float
    q_s: float = 0.0
    request_s: float = 0.0

    def step_s(
        self, prefill_tokens: int, decoding: int, kv_tokens: int, pairs: float = 0.0, began: int = 0
    ) -> float:
        """Return `t0 + max(w, g (P + B)) + b B + c KV + q pairs + request R`.

        P: prefill tokens, B: decoding sequences, KV: resident KV tokens, R: requests that start.
        """
        t0_s, w_s, g_s, b_s, c_s, q_s, request_s = self
        tokens_s = g_s * (prefill_tokens + decoding)
        return (
            t0_s
            + (w_s if w_s > tokens_s else tokens_s)  # noqa: FURB136 - max() takes half of the function
            + b_s * decoding
            + c_s * kv_tokens
            + q_s * pairs
            + request_s * began
        )
