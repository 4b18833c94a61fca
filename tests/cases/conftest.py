"""What several cases share."""

from __future__ import annotations

import pytest
from model.conftest import cache, tiny_models, worker

from shmcache.identity import ContextParams

__all__ = ["cache", "tiny_models", "worker"]  # the model layer's fixtures, for the cases that need a model


@pytest.fixture
def plain_context() -> ContextParams:
    """A context without adapters, overrides or a tenant."""
    return ContextParams(
        n_ctx=2048,
        type_k=1,
        type_v=1,
        flash_attn=0,
        swa_full=True,
        n_seq_max=1,
        kv_unified=False,
        attention_type=-1,
        rope_scaling_type=-1,
        rope_freq_base=0.0,
        rope_freq_scale=0.0,
        yarn_ext_factor=-1.0,
        yarn_attn_factor=1.0,
        yarn_beta_fast=32.0,
        yarn_beta_slow=1.0,
        yarn_orig_ctx=0,
        build=b"\x66" * 32,
    )
