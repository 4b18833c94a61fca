"""What does a worker say about a row: where is it, how large may it get, who made it?

    Author      what all rows of one worker have in common: model, context, machine
    anchor_plan a row at a boundary of the prompt, whose text and length are known
    reply_plan  a row behind a reply that is still to come
    live_plan   a row of what the cells hold now
    meta        the metadata of a finished row

Owner: one SharedLlama. Readers: the same.
Leaves out: which boundaries get a row (policy), the bytes of the metadata (kvc), the copy (state).
"""

from __future__ import annotations

import platform
import time
from pathlib import Path

import llama_cpp
import msgspec

from shmcache import __version__
from shmcache.client import SavePlan
from shmcache.identity import (
    FingerprintMode,
    Identity,
    ctx_params_hash,
    fingerprint,
    gguf_quant,
    tenant_hash,
)
from shmcache.key import BLOCK_BYTES, PrefixWalk, RowAddress, row_address
from shmcache.kvc import HEAD_DETAIL, Meta, Reason, head_bytes
from shmcache.workers.state import ContextState, SizeLine, context_params
from shmcache.workers.trail import Trail

_SPARE_PIECES = 64  # entries of a split that a slab has room for beyond those of the sequence so far


class Author(msgspec.Struct, frozen=True, kw_only=True):
    """What all rows of one worker have in common."""

    identity: Identity
    fingerprint_mode: str
    quant_name: str
    quant_bits: int
    model_name: str
    context_size: int
    n_swa: int
    rewindable: bool
    tenant: str | None
    size: SizeLine

    @classmethod
    def of(
        cls, llama: llama_cpp.Llama, state: ContextState, mode: FingerprintMode, tenant: str | None
    ) -> Author:
        """Identify the model and the context of a Llama, and see how large its states are."""
        path = llama.model_path
        quant_name = llama._model.desc().split(" ", 2)[-1]  # "llama 135M Q4_1"
        return cls(
            identity=Identity(
                model_fp=fingerprint(path, mode),
                quant=gguf_quant(path),
                ctx_params_hash=ctx_params_hash(context_params(llama, tenant)),
            ),
            fingerprint_mode=mode,
            quant_name=quant_name,
            quant_bits=round(8 * llama._model.size() / llama._model.n_params()),
            model_name=llama.metadata.get("general.name", Path(path).name),
            context_size=llama.n_ctx(),
            n_swa=state.n_swa,
            rewindable=state.rewindable,
            tenant=tenant,
            size=state.measured_size(),
        )

    def anchor_plan(self, walk: PrefixWalk, text_bytes: int, token_count: int, trail: Trail) -> SavePlan:
        """Plan a row of the walk's first `text_bytes` bytes."""
        address = RowAddress(
            key=walk.key_at(text_bytes),
            block_key=walk.block_keys[text_bytes // BLOCK_BYTES],
            tail=text_bytes % BLOCK_BYTES,
        )
        return SavePlan(
            address=address,
            text_bytes=text_bytes,
            payload_offset=head_bytes(token_count, len(trail.pieces) + _SPARE_PIECES),
            payload_bytes=self.size.bytes_at(token_count),
            tenant_hash=self.tenant_hash,
        )

    @property
    def tenant_hash(self) -> bytes | None:
        """The tenant as rows name it."""
        return tenant_hash(self.tenant) if self.tenant is not None else None

    def reply_plan(self, token_count: int, most_tokens: int, trail: Trail) -> SavePlan:
        """Plan a row of the trail and a reply: room for the state of `token_count` tokens and the ids of all.

        A slab can grow behind its head, but the head cannot grow (4 bytes for each token).
        """
        return SavePlan(
            address=None,
            text_bytes=len(trail.text),
            payload_offset=head_bytes(most_tokens, len(trail.pieces) + _SPARE_PIECES),
            payload_bytes=self.size.bytes_at(token_count),
            tenant_hash=self.tenant_hash,
        )

    def live_plan(self, trail: Trail) -> SavePlan:
        """Plan a row of the trail as it is."""
        return SavePlan(
            address=row_address(self.identity.seed, trail.text),
            text_bytes=len(trail.text),
            payload_offset=head_bytes(len(trail), len(trail.pieces) + _SPARE_PIECES),
            payload_bytes=self.size.bytes_at(len(trail)),
            tenant_hash=self.tenant_hash,
        )

    def meta(self, trail: Trail, reason: Reason, pos_min: int, *, is_head: bool = False) -> Meta:
        """Describe the row that the trail is now."""
        address = row_address(self.identity.seed, trail.text)
        now_s = int(time.time())
        return Meta(
            quant_bits=self.quant_bits,
            save_reason=reason,
            token_count=len(trail),
            context_size=self.context_size,
            created_unix_s=now_s,
            last_used_unix_s=now_s,
            model_fp=self.identity.model_fp,
            fingerprint_mode=self.fingerprint_mode,
            quant_name=self.quant_name,
            ctx_params_hash=self.identity.ctx_params_hash,
            hostname=platform.node(),
            shmcache_version=__version__,
            reason_detail=HEAD_DETAIL if is_head else "",
            text_bytes=len(trail.text),
            key=address.key,
            block_key=address.block_key,
            n_swa=self.n_swa,
            pos_min=pos_min,
            rewindable=self.rewindable,
            model_name=self.model_name,
            tenant_hash=self.tenant_hash,
            layout=self.size.layout,
            base_key=trail.base_key(),
        )
