"""Client of Prometheus: the queries, a bounded session, and the samples of each pod."""

from fleetkeeper.adapters.prometheus.answers import PodKey, PrometheusReading
from fleetkeeper.adapters.prometheus.client import Prometheus, PrometheusSettings
from fleetkeeper.adapters.prometheus.session import PrometheusError

__all__ = ["PodKey", "Prometheus", "PrometheusError", "PrometheusReading", "PrometheusSettings"]
