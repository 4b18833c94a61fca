"""What does Prometheus get to see? The server's board, and the namespace's own figures.

Owner: nobody, it reads when it is asked. Readers: GET /metrics of any worker; all say the same.
Leans on: the board is there for all workers (board), the namespace's figures need no coordinator (observe).
So there is no directory of files as in prometheus_client's own multiprocess mode, and nothing is left of it.
Leaves out: figures by tenant, which would tell one of another.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shmcache.errors import ShmcacheError
from shmcache.observe import observe
from shmcache.workers.serve.board import BOUNDS_S, Board

_OUTCOMES = ("answered", "refused", "overloaded", "failed", "hung_up")
_TOKENS = ("prompt_tokens", "reused_tokens", "completion_tokens")
_CACHE_GAUGES = {"rows": "rows", "used_bytes": "bytes of rows", "budget_bytes": "bytes that rows may take"}


class ServerCollector(Collector):
    """Figures of one server and of the cache behind it."""

    def __init__(self, board: Board, namespace: str) -> None:
        self._board = board
        self._namespace = namespace

    def collect(self) -> Iterator[Metric]:
        """All of them, read now."""
        yield from self._server()
        yield from self._cache()

    def _server(self) -> Iterator[Metric]:
        board = self._board
        yield GaugeMetricFamily("shmcache_serve_workers", "Workers that answer.", board.serving())
        yield GaugeMetricFamily("shmcache_serve_running", "Requests being computed.", board.running())
        waiting = max(0, board.open() - board.running())
        yield GaugeMetricFamily("shmcache_serve_waiting", "Requests that wait for a worker.", waiting)
        requests = CounterMetricFamily("shmcache_serve_requests", "Requests by outcome.", labels=["outcome"])
        for outcome in _OUTCOMES:
            requests.add_metric([outcome], board.total(outcome))
        yield requests
        tried = board.total("tried_again")
        yield CounterMetricFamily("shmcache_serve_tried_again", "Requests whose worker died.", tried)
        yield CounterMetricFamily("shmcache_serve_lookups", "Questions of routers.", board.total("lookups"))
        tokens = CounterMetricFamily("shmcache_serve_tokens", "Tokens of answers.", labels=["kind"])
        for kind in _TOKENS:
            tokens.add_metric([kind.removesuffix("_tokens")], board.total(kind))
        yield tokens
        for name, what in (("first_token", "until the first token"), ("request", "until the last one")):
            yield self._histogram(name, f"Seconds from a request's arrival {what}.")

    def _histogram(self, name: str, text: str) -> Metric:
        figures = self._board.histogram(name)
        buckets, sofar = [], 0
        for bound, count in zip((*BOUNDS_S, float("inf")), figures.counts, strict=True):
            sofar += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), sofar))
        return HistogramMetricFamily(f"shmcache_serve_{name}_seconds", text, buckets, figures.sum_s)

    def _cache(self) -> Iterator[Metric]:
        try:
            seen = observe(self._namespace)
        except (ShmcacheError, OSError):
            yield GaugeMetricFamily("shmcache_coordinator_up", "Whether the coordinator runs.", 0)
            return
        up = int(seen.coordinator_running)
        yield GaugeMetricFamily("shmcache_coordinator_up", "Whether the coordinator runs.", up)
        for field, text in _CACHE_GAUGES.items():
            family = GaugeMetricFamily(f"shmcache_{field}", f"In the cache: {text}.", labels=["tier"])
            for tier, figures in seen.tiers.items():
                family.add_metric([tier], getattr(figures, field))
            yield family
        evictions = CounterMetricFamily("shmcache_evictions", "Rows that left for want of space.")
        evictions.add_metric([], seen.evictions)
        yield evictions


def exposition(board: Board, namespace: str) -> bytes:
    """The figures as Prometheus reads them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerCollector(board, namespace))
    return generate_latest(registry)
