"""Model workers over llama-cpp-python."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmcache.workers.request import Report
    from shmcache.workers.shared_llama import SharedLlama

__all__ = ["Report", "SharedLlama"]


def __getattr__(name: str) -> Any:
    """Import llama_cpp at the first use of a model: a pool's parent and the tools do without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shmcache.workers import request, shared_llama  # noqa: PLC0415

    return getattr(request if name == "Report" else shared_llama, name)
