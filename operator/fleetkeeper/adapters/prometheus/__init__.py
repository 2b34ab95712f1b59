"""Client of Prometheus: the queries, their bounded answers, and the samples of each pod."""

from fleetkeeper.adapters.prometheus.answers import PodKey, PrometheusReading
from fleetkeeper.adapters.prometheus.client import Prometheus, PrometheusError, PrometheusSettings

__all__ = ["PodKey", "Prometheus", "PrometheusError", "PrometheusReading", "PrometheusSettings"]
