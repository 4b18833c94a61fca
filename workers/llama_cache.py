"""For a program that uses llama_cpp.Llama and set_cache: one line of it differs.

    llama = Llama("model.gguf")
    llama.set_cache(LlamaRAMCache())                          a cache of this process, of whole contexts
    llama.set_cache(SharedLlamaCache(llama, "default"))       rows that all processes share

llama_cpp's own protocol moves a whole context and a table of scores at the end of each completion, and knows
nothing of the batches that made a state. So the cache takes the Llama that it serves and puts SharedLlama's
methods in front of its own: what restores and saves is the instance, and llama_cpp has nothing to move.

Owner: the process that loaded the Llama. Readers: llama_cpp, which asks whether there is a cache: no.
Invariants
    I1  What is saved is what was loaded: the file that is mapped, or one that has not changed since this
        process began. Where that is not known, nothing is shared.
    I2  set_cache with anything else ends the sharing.
Leans on
    `if self.cache:` is all that llama_cpp asks before it moves states.
    An instance's class may be replaced by one of the same layout, which classes without slots are.
Leaves out: everything that SharedLlama does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import llama_cpp
import psutil
from llama_cpp.llama_cache import BaseLlamaCache

from shmcache.client import KEPT_MAPPING_BYTES, attach
from shmcache.config import Gates
from shmcache.errors import ConfigError
from shmcache.workers.edge import Edge
from shmcache.workers.lookup import reusable_tokens
from shmcache.workers.shared_llama import SharedLlama

log = logging.getLogger(__name__)

_MAPS = Path("/proc/self/maps")


class SharedLlamaCache(BaseLlamaCache):
    """A cache for `llm.set_cache`, shared by all processes of a namespace.

    cache_size is the bytes of rows that this process keeps mapped; they belong to all.
    """

    def __init__(
        self,
        llm: llama_cpp.Llama,
        namespace: str = "default",
        *,
        tier: str = "ram_file",
        gates: Gates | None = None,
        tenant: str | None = None,
        explain_saves: bool = False,
        audit_rate: float = 0.0,
    ) -> None:
        """Take a loaded Llama. What is in its context is dropped, as any other prompt would drop it.

        Args:
            llm: the Llama that this cache will be set on; no other can use it.
            namespace: of the coordinator.
            tier, gates, tenant, explain_saves, audit_rate: as in attach and SharedLlama.
        Raises:
            ConfigError: a SharedLlama, which shares already, or a setting that cannot be.
        """
        if isinstance(llm, SharedLlama):
            raise ConfigError("a SharedLlama shares already: name the namespace when it is made")
        self._attached = attach(namespace, tier=tier)
        super().__init__(KEPT_MAPPING_BYTES)
        self._llm = _adopt(llm)
        shared = self._attached if _is_known(Path(llm.model_path)) else None
        SharedLlama.__init__(
            self._llm,
            llm.model_path,
            cache=shared,
            gates=gates,
            tenant=tenant,
            explain_saves=explain_saves,
            audit_rate=audit_rate,
        )
        self._llm._owned_cache = self._attached  # closed with the Llama

    @property
    def cache_size(self) -> int:
        """Bytes of rows that this process keeps mapped."""
        return self._attached.statistics().kept_bytes

    def __bool__(self) -> bool:
        # llama_cpp is to move no states: its instance does, and better.
        return False

    def __contains__(self, key: Sequence[int]) -> bool:
        author = self._llm._author
        if author is None:
            return False
        return reusable_tokens(self._llm._edge, self._llm._renderer, author.identity, list(key)) > 0

    def __getitem__(self, key: Sequence[int]) -> NoReturn:
        raise KeyError("the Llama restores its rows by itself")

    def __setitem__(self, key: Sequence[int], value: llama_cpp.LlamaState) -> None:
        """Do nothing: the Llama has saved its row."""

    def close(self) -> None:
        """Let go of the namespace; this happens by itself when the Llama is closed, or the process ends."""
        self._attached.close()


class _AlreadyLoaded(llama_cpp.Llama):
    """Stands behind SharedLlama, where Llama's constructor would load the model once more."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class _Adopted(SharedLlama):
    """A Llama that was loaded without us."""

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """As in llama_cpp.Llama; anything but the cache that took this Llama ends the sharing (I2)."""
        if not isinstance(cache, SharedLlamaCache) or cache._llm is not self:
            self._cache, self._edge, self._author = None, Edge(None), None
        super().set_cache(cache)


def _adopt(llm: llama_cpp.Llama) -> SharedLlama:
    """Put our methods in front of its own."""
    kind = type(llm)
    llm.__class__ = type(kind.__name__, (_Adopted, _AlreadyLoaded, kind), {"__module__": kind.__module__})
    assert isinstance(llm, SharedLlama)
    return llm


def _is_known(path: Path) -> bool:
    """Whether what was loaded from this path is what lies there now (I1)."""
    try:
        state = path.stat()
        is_older = max(state.st_ctime, state.st_mtime) < psutil.Process().create_time()
        if is_older or [str(state.st_ino), str(path.resolve())] in _mapped_files():
            return True
    except (OSError, psutil.Error) as error:
        log.warning("%s: nothing is shared", error)
        return False
    log.warning("%s may have changed since it was loaded: nothing is shared", path)
    return False


def _mapped_files() -> list[list[str]]:
    """Inode and path of each mapping; a file that was replaced shows as deleted."""
    return [line.split(maxsplit=5)[4:] for line in _MAPS.read_text().splitlines()]
