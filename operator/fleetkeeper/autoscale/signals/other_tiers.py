"""The signals of a service without tier batch: what counts for replicas while a backlog is known."""

from __future__ import annotations

from dataclasses import replace

from fleetkeeper.autoscale.signals.service_signals import Signals


def without_batch(signals: Signals) -> Signals:
    """Return the signals of realtime and standard alone.

    The batch process sends as much as engines take. So requests of tier batch that arrive, run or wait
    say nothing about the replicas that are needed: the deadlines do. Samples hold what runs of all tiers
    together, so batch is taken to have the share of it that it has of the scheduled requests.
    """
    rates, gauges = signals.rates, signals.gauges
    served = signals.served_per_s
    left = 1.0 - rates.wait_count_batch / served if served > 0 else 1.0
    others = rates.arrivals_realtime + rates.arrivals_standard
    is_alone = others + gauges.waiting_realtime + gauges.waiting_standard == 0
    return replace(
        signals,
        rates=rates._replace(
            arrivals_batch=0.0, wait_count_batch=0.0, wait_sum_s_batch=0.0, wait_within_batch=0.0
        ),
        gauges=gauges._replace(
            waiting_batch=0.0, oldest_wait_s_batch=0.0, running=gauges.running * left
        ),
        kv_ratio=signals.kv_ratio * left,
        queue_wait_s=0.0 if is_alone else signals.queue_wait_s,
        waiting=gauges.waiting_realtime + gauges.waiting_standard,
    )
