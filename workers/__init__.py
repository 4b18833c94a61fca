"""Model workers over llama-cpp-python."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmcache.workers.decide import DecisionModel, Temperatures
    from shmcache.workers.request import Report
    from shmcache.workers.shared_llama import SharedLlama

__all__ = ["DecisionModel", "Report", "SharedLlama", "Temperatures"]

_HOME = {
    "DecisionModel": "decide",
    "Report": "request",
    "SharedLlama": "shared_llama",
    "Temperatures": "decide",
}


def __getattr__(name: str) -> Any:
    """Import llama_cpp at the first use of a model: a pool's parent and the tools do without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"shmcache.workers.{_HOME[name]}"), name)
