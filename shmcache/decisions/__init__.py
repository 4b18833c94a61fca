"""The decision cache: typed decisions, computed once and replayed to every process.

The names below are imported when they are asked for: the coordinator uses this package too, and starts
without asyncio, executors and whatever else only a worker needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmcache.decisions.cache import CacheInfo, DecisionCache
    from shmcache.decisions.fallback import FallbackStore
    from shmcache.decisions.margins import decision_margins
    from shmcache.decisions.memo import DetectionMemo
    from shmcache.decisions.redis import RedisStore
    from shmcache.decisions.shared import SharedStore
    from shmcache.decisions.stores import DecisionStore, MemoryStore, SqliteStore

__all__ = [
    "CacheInfo",
    "DecisionCache",
    "DecisionStore",
    "DetectionMemo",
    "FallbackStore",
    "MemoryStore",
    "RedisStore",
    "SharedStore",
    "SqliteStore",
    "decision_margins",
]

_HOMES = {
    "CacheInfo": "cache",
    "DecisionCache": "cache",
    "DecisionStore": "stores",
    "DetectionMemo": "memo",
    "FallbackStore": "fallback",
    "MemoryStore": "stores",
    "RedisStore": "redis",
    "SharedStore": "shared",
    "SqliteStore": "stores",
    "decision_margins": "margins",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
