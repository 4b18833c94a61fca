"""The decision cache: typed decisions, computed once and replayed to every process."""

from shmcache.decisions.cache import CacheInfo, DecisionCache
from shmcache.decisions.fallback import FallbackStore
from shmcache.decisions.margins import decision_margins
from shmcache.decisions.memo import DetectionMemo
from shmcache.decisions.stores import DecisionStore, MemoryStore, SqliteStore

__all__ = [
    "CacheInfo",
    "DecisionCache",
    "DecisionStore",
    "DetectionMemo",
    "FallbackStore",
    "MemoryStore",
    "SqliteStore",
    "decision_margins",
]
