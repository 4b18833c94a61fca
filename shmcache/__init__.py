"""One KV-state cache in shared memory for all llama.cpp workers of a machine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmcache.client import Cache, Hit, SavePlan, Slab, attach
    from shmcache.errors import ShmcacheError

__version__ = "0.1.0"

__all__ = ["Cache", "Hit", "SavePlan", "ShmcacheError", "Slab", "attach"]


def __getattr__(name: str) -> Any:
    """Import a worker's side at its first use: the coordinator starts faster without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shmcache import client, errors  # noqa: PLC0415

    return getattr(errors if name == "ShmcacheError" else client, name)
