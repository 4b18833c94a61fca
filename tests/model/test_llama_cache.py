"""SharedLlamaCache: a stock Llama, one line of its user's program, and rows that all processes share."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from llama_cpp.llama_cache import BaseLlamaCache, LlamaRAMCache
from model import tiny
from model.conftest import OPTIONS, SMALL, MakeLlama
from support import Child, Pipe, eventually

from shmcache import Cache
from shmcache.errors import ConfigError
from shmcache.observe import observe
from shmcache.tools.demo import CoordinatorProcess
from shmcache.workers.llama_cache import SharedLlamaCache

PROMPT = " ".join(f"word{number}" for number in range(60))
ASKED: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}


@pytest.fixture
def stock(tmp_path: Path) -> Iterator[Any]:
    """Load stock Llamas: stock(path)."""
    made: list[llama_cpp.Llama] = []

    def load(path: Path, kind: type[llama_cpp.Llama] = llama_cpp.Llama, **options: Any) -> llama_cpp.Llama:
        made.append(kind(str(path), **{**OPTIONS, **options}))
        return made[-1]

    yield load
    for llama in made:
        llama.close()


def test_a_stock_llama_shares_its_rows_with_every_process(
    stock: Any, tiny_models: dict[str, Path], cache: Cache, namespace: str
) -> None:
    path = tiny_models["llama"]
    llama = stock(path)
    shared = SharedLlamaCache(llama, namespace, gates=SMALL)
    llama.set_cache(shared)
    assert isinstance(shared, BaseLlamaCache)
    first = llama(PROMPT, **ASKED)
    assert first["shmcache"]["cache_hit_kind"] == "cold"
    tokens = llama.tokenize(PROMPT.encode())
    eventually(lambda: tokens in shared)

    other = Child(_ask_in_another_process, str(path), namespace)
    try:
        report, text = other.hear(60)
    finally:
        other.close()
    assert (report["cache_hit_kind"], report["source"]) == ("exact", "shared")
    assert text == first["choices"][0]["text"]
    assert shared.cache_size >= 0
    with pytest.raises(KeyError):
        shared[tokens]


def _ask_in_another_process(pipe: Pipe, path: str, namespace: str) -> None:
    llama = llama_cpp.Llama(path, **OPTIONS)
    shared = SharedLlamaCache(llama, namespace, gates=SMALL, audit_rate=1.0)
    llama.set_cache(shared)
    answer = llama(PROMPT, **ASKED)
    counters = shared._attached.statistics().counters
    assert (counters["audits"], counters["audits_differed"]) == (1, 0)
    pipe.say([answer["shmcache"], answer["choices"][0]["text"]])
    llama.close()


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_its_rows_are_those_of_shared_llama_both_ways(  # noqa: PLR0917
    stock: Any, worker: MakeLlama, tiny_models: dict[str, Path], cache: Cache, namespace: str, kind: str
) -> None:
    path = tiny_models[kind]
    shared = worker(path, cache)
    adopted = stock(path)
    adopted.set_cache(SharedLlamaCache(adopted, namespace, gates=SMALL))
    for one, other, prompt in ((shared, adopted, PROMPT), (adopted, shared, f"other {PROMPT}")):
        first = one(prompt, **ASKED)
        cache.flush(10_000)
        eventually(lambda key=first["shmcache"]["finish_key"]: cache.get(bytes.fromhex(key)))  # type: ignore[misc]
        again = other(prompt, **ASKED)
        assert again["shmcache"]["source"] == "shared"
        assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_streams_chats_and_methods_of_ones_own_class_go_on(
    stock: Any, tiny_models: dict[str, Path], cache: Cache, namespace: str
) -> None:
    class Counting(llama_cpp.Llama):
        tokenized = 0

        def tokenize(self, *args: Any, **kwargs: Any) -> list[int]:
            self.tokenized += 1
            return super().tokenize(*args, **kwargs)

    llama = stock(tiny_models["llama"], Counting)
    llama.set_cache(SharedLlamaCache(llama, namespace, gates=SMALL))
    chat: list[Any] = [{"role": "user", "content": PROMPT}]
    whole = llama.create_chat_completion(chat, **ASKED)["choices"][0]["message"]["content"]
    chunks = llama.create_chat_completion(chat, **ASKED, stream=True)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
    assert llama.tokenized >= 2
    assert type(llama).__name__ == "Counting"


def test_nothing_moves_whole_contexts(
    stock: Any, tiny_models: dict[str, Path], cache: Cache, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = stock(tiny_models["llama"])
    llama.set_cache(SharedLlamaCache(llama, namespace, gates=SMALL))
    for name in ("save_state", "load_state"):
        monkeypatch.setattr(llama, name, lambda *_: pytest.fail("a whole context was moved"))
    llama(PROMPT, **ASKED)
    list(llama(PROMPT, **ASKED, stream=True))


@pytest.mark.parametrize("following", [None, LlamaRAMCache()])
def test_another_cache_ends_the_sharing(
    stock: Any, tiny_models: dict[str, Path], cache: Cache, namespace: str, following: Any
) -> None:
    llama = stock(tiny_models["llama"])
    shared = SharedLlamaCache(llama, namespace, gates=SMALL)
    llama.set_cache(shared)
    llama.set_cache(following)
    assert llama(PROMPT, **ASKED)["choices"]
    assert llama.tokenize(PROMPT.encode()) not in shared
    cache.flush(10_000)
    assert cache.connection.reader() is not None


def test_the_cache_is_closed_with_its_llama(
    stock: Any, tiny_models: dict[str, Path], coordinator: CoordinatorProcess, namespace: str
) -> None:
    llama = stock(tiny_models["llama"])
    llama.set_cache(SharedLlamaCache(llama, namespace, gates=SMALL))
    llama(PROMPT, **ASKED)
    eventually(lambda: len(observe(namespace).workers) == 1)
    llama.close()
    eventually(lambda: not observe(namespace).workers)


def test_without_a_coordinator_it_serves(stock: Any, tiny_models: dict[str, Path], namespace: str) -> None:
    llama = stock(tiny_models["llama"])
    llama.set_cache(SharedLlamaCache(llama, namespace, gates=SMALL))
    assert llama(PROMPT, **ASKED)["shmcache"]["cache_hit_kind"] == "cold"


def test_a_file_that_was_replaced_after_it_was_loaded_is_not_shared(
    stock: Any, tiny_models: dict[str, Path], tmp_path: Path, cache: Cache, namespace: str
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_models["llama"], path)
    llama = stock(path)
    other = tiny.build("llama", tmp_path, seed=2)
    time.sleep(0.01)  # a new ctime
    other.rename(path)
    llama.set_cache(SharedLlamaCache(llama, namespace, gates=SMALL))
    assert llama(PROMPT, **ASKED)["shmcache"]["finish_key"] is None


def test_what_cannot_be_shared_is_refused(
    stock: Any, worker: MakeLlama, tiny_models: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match="shares already"):
        SharedLlamaCache(worker(tiny_models["llama"]), "default")
    llama = stock(tiny_models["llama"])
    with pytest.raises(ConfigError, match="namespace"):
        SharedLlamaCache(llama, "No Such Name")
    assert type(llama) is llama_cpp.Llama
