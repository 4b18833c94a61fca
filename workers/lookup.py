"""How much of this prompt need not be computed? Asked without touching the cells, also while they are in use.

Owner: nobody, the function keeps nothing. Readers: a router's question (serve), llama_cache.
Leans on: a vocabulary and published rows never change, so any thread may read both.
Leaves out: what is in a context's own cells, which another request may take meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right

from shmcache.identity import Identity
from shmcache.key import PrefixWalk
from shmcache.workers.edge import Edge
from shmcache.workers.render import Renderer


def reusable_tokens(edge: Edge, renderer: Renderer, identity: Identity, tokens: list[int]) -> int:
    """Tokens of this prompt that the longest row covers; the last one is always decoded, for its logits."""
    if len(tokens) < 2:
        return 0
    text = renderer.render(tokens)
    for hit in edge.candidates(PrefixWalk(identity.seed, text.text)):
        covered = bisect_right(text.ends, hit.image.meta.text_bytes)
        hit.close()
        return min(covered, len(tokens) - 1)
    return 0
