"""What does it cost to find the longest row that a prompt begins with?

    walk_120kB_1e3_rows_vs_sha256   key the prompt's prefixes, find its longest row among 1,000
                                    ÷ one bare SHA-256 pass over the prompt
    walk_1e5_vs_1e3_rows            the same among 100,000 rows ÷ among 1,000
    lookup_and_render_vs_tokenise   a 120 kB prompt's tokens rendered and its longest row found
                                    ÷ the tokenisation of that prompt by llama.cpp
    walk_vs_llama_ram_cache         the longest of 20 rows of 30,000 tokens
                                    ÷ the same lookup in llama-cpp-python's LlamaRAMCache

Rows among 1,000 and 100,000: random distinct lengths up to 120 kB. One in ten lies on the prompt's own
path, the others share a random part of it and then differ. The rows against LlamaRAMCache share a random
part of the prompt too, and one of them all: where entries differ from the prompt at once, its lookup stops
at once, and has found nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import llama_cpp
from llama_cpp.llama_cache import LlamaRAMCache

from bench.harness import Options, Row, compared, typical
from bench.index import make_index, working_directory
from shmcache import index
from shmcache.key import BLOCK_BYTES, SEED_BYTES, PrefixWalk
from shmcache.shm import Mapping
from shmcache.tools.model import model_path
from shmcache.workers.render import Renderer
from shmcache.workers.state import ModelVocabulary

PROMPT_BYTES = 120_000
FEW, MANY = 1_000, 100_000
ON_PATH = 10  # one row in so many
SIBLINGS = 50
ENTRIES, ENTRY_TOKENS = 20, 30_000
SEED = bytes(SEED_BYTES)


def rows(options: Options) -> Iterable[Row]:
    """All rows of this bench."""
    count = 20 if options.quick else 100
    with working_directory() as directory:
        prompt = random.randbytes(PROMPT_BYTES)
        few, many = (_nested_and_beside(directory, prompt, rows_held) for rows_held in (FEW, MANY))
        yield compared(
            "walk_120kB_1e3_rows_vs_sha256",
            "us",
            "hashlib.sha256",
            (lambda: few.longest_us(count), lambda: typical(lambda _: _hash(prompt), count)),
            options.repeats,
        )
        yield compared(
            "walk_1e5_vs_1e3_rows",
            "us",
            "1,000 rows",
            (lambda: many.longest_us(count), lambda: few.longest_us(count)),
            options.repeats,
        )
        yield _against_tokenise(directory, options)
        yield _against_ram_cache(directory, options)


def _hash(prompt: bytes) -> None:
    state = sha256(SEED)
    state.update(prompt)
    state.digest()


class Searched:
    """An index of given prefixes of given texts, and the prompt whose longest row is looked for."""

    def __init__(
        self, path: Path, prompt: bytes, prefixes: Iterable[tuple[PrefixWalk, int]], count: int
    ) -> None:
        self.prompt = prompt
        self._written, writer = make_index(path, count)
        for walk, length in prefixes:
            block, tail = divmod(length, BLOCK_BYTES)
            key, block_key = walk.key_at(length), walk.block_keys[block]
            writer.publish(index.Row(key, block_key, tail, 1, length, 4096, length // 4, 1, 1, 0), _coldest)
        self._mapping = Mapping.open(path)
        self.reader = index.IndexReader(self._mapping.bytes)

    def longest(self) -> index.Found | None:
        """The longest row that the prompt begins with."""
        return next(self.reader.candidates(PrefixWalk(SEED, self.prompt), PROMPT_BYTES), None)

    def longest_us(self, count: int) -> float:
        """Time of one such lookup, in us."""
        return typical(lambda _: self.longest(), count)


def _coldest(slots: object) -> int:
    raise AssertionError(f"both buckets are full: {slots}")


def _nested_and_beside(directory: Path, prompt: bytes, count: int) -> Searched:
    own = PrefixWalk(SEED, prompt)
    forks = [0, *random.sample(range(PROMPT_BYTES), SIBLINGS)]
    siblings = [PrefixWalk(SEED, prompt[:fork] + random.randbytes(PROMPT_BYTES - fork)) for fork in forks]
    prefixes = []
    for number, length in enumerate(random.sample(range(1, PROMPT_BYTES + 1), count)):
        away = random.choice([walk for fork, walk in zip(forks, siblings, strict=True) if fork < length])
        prefixes.append((away if number % ON_PATH else own, length))
    return Searched(directory / f"index.{count}", prompt, prefixes, count)


def _against_tokenise(directory: Path, options: Options) -> Row:
    words = Path(__file__).parents[1].joinpath("LICENSE").read_text(encoding="utf-8").split()
    text = " ".join(random.choices(words, k=PROMPT_BYTES // 4))[:PROMPT_BYTES].encode()
    llama = llama_cpp.Llama(str(model_path()), vocab_only=True, verbose=False)
    renderer = Renderer(ModelVocabulary(llama))
    tokens = llama.tokenize(text, add_bos=False, special=True)
    prompt = renderer.render(tokens).text
    walk = PrefixWalk(SEED, prompt)
    searched = Searched(directory / "index.text", prompt, [(walk, len(prompt) - 1000), (walk, 5000)], FEW)

    def render_and_look_up(_: int) -> None:
        searched.prompt = renderer.render(tokens).text
        if searched.longest() is None:
            raise AssertionError("the row is there and was not found")

    return compared(
        "lookup_and_render_vs_tokenise",
        "us",
        "Llama.tokenize",
        (
            lambda: typical(render_and_look_up, 5),
            lambda: typical(lambda _: llama.tokenize(text, add_bos=False, special=True), 1),
        ),
        options.repeats,
    )


def _against_ram_cache(directory: Path, options: Options) -> Row:
    pieces = [b"%04d" % number for number in range(10_000)]
    tokens = random.choices(range(len(pieces)), k=ENTRY_TOKENS)
    shared = [ENTRY_TOKENS, *(random.randrange(ENTRY_TOKENS) for _ in range(ENTRIES - 1))]
    entries = [
        tokens[:common] + random.choices(range(len(pieces)), k=ENTRY_TOKENS - common) for common in shared
    ]
    theirs = LlamaRAMCache()
    for entry in entries:
        theirs[entry] = cast(llama_cpp.LlamaState, SimpleNamespace(llama_state_size=1))
    texts = [b"".join(pieces[token] for token in entry) for entry in entries]
    ours = Searched(
        directory / "index.entries",
        texts[0],
        [(PrefixWalk(SEED, text), len(text)) for text in texts],
        ENTRIES,
    )
    return compared(
        "walk_vs_llama_ram_cache",
        "us",
        "LlamaRAMCache[tokens]",
        (lambda: ours.longest_us(20), lambda: typical(lambda _: theirs[tokens], 3)),
        options.repeats,
    )
