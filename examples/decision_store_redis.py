"""Decisions that a fleet of machines shares through Redis: computed once, replayed everywhere.

    REDIS_URL=redis://host:6379/0 python examples/decision_store_redis.py
    pip install fakeredis && python examples/decision_store_redis.py      # without a server

Two caches stand for two machines: the second replays what the first has decided. While Redis cannot be
reached each machine decides for itself, and offers that to Redis at its return.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from shmcache.decisions import DecisionCache, FallbackStore, MemoryStore, RedisStore

QUESTIONS = {
    "intent": {
        "type": "choice",
        "instructions": "What does the customer want?",
        "criteria": ["refund", "cancel", "other"],
    }
}


def slow_model(state: Any, questions: Any) -> Any:
    """Half a second of thought."""
    time.sleep(0.5)
    return {"answers": {"intent": "refund" if "money" in state else "other"}}


def redis_client() -> Any:
    """The URL of a server, or a client of a fake one in this process."""
    if url := os.environ.get("REDIS_URL"):
        return url
    try:
        from fakeredis import FakeRedis  # noqa: PLC0415 (needed only here)
    except ImportError:
        sys.exit("set REDIS_URL, or: pip install fakeredis")
    return FakeRedis()


def main() -> None:
    """Ask on two machines, and say how long each took."""
    client = redis_client()
    prefix = f"example-{os.getpid()}:"
    machines = [
        DecisionCache(FallbackStore(RedisStore(client, prefix), MemoryStore()), ttl=3600) for _ in range(2)
    ]
    for name, cache in zip(("first", "second"), machines, strict=True):
        started = time.perf_counter()
        result = cache.get_or_compute("demo-model", "I want my money back", QUESTIONS, slow_model)
        took_ms = (time.perf_counter() - started) * 1000
        print(f"{name} machine: {result['answers']['intent']} in {took_ms:.1f} ms")
    print(f"decisions in Redis: {machines[1].cache_info()['size']}")
    machines[0].cache_clear()


if __name__ == "__main__":
    main()
