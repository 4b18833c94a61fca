"""E09: one user's prompts show in the hits of another; untagged parts of a key run into each other."""

from __future__ import annotations

from msgspec.structs import replace
from support import PLAIN_CONTEXT

from shmcache.identity import ContextParams, Identity, Lora, ctx_params_hash
from shmcache.key import PrefixWalk, key_of, row_address


def seed_of(params: ContextParams) -> bytes:
    return Identity(model_fp=b"m" * 32, quant=3, ctx_params_hash=ctx_params_hash(params)).seed


def test_case_e09_no_tenant_finds_the_row_of_another() -> None:
    text = b"a shared system prompt " * 100
    row = row_address(seed_of(replace(PLAIN_CONTEXT, tenant="A")), text)
    for tenant in ("B", None, "", "a", "A ", "A\0"):
        walk = PrefixWalk(seed_of(replace(PLAIN_CONTEXT, tenant=tenant)), text + b"more")
        assert row.block_key not in walk.block_keys
        assert row.key != walk.key_at(len(text))


def test_case_e09_a_tenant_does_not_run_into_the_prompt() -> None:
    keys = {
        key_of(seed_of(replace(PLAIN_CONTEXT, tenant=tenant)), prompt)
        for tenant, prompt in (("a", b"bc"), ("ab", b"c"), ("abc", b""), ("", b"abc"), (None, b"abc"))
    }
    assert len(keys) == 5


def test_case_e09_a_tenant_named_like_an_adapter_is_not_that_adapter() -> None:
    settings = (
        replace(PLAIN_CONTEXT, tenant="x"),
        replace(PLAIN_CONTEXT, loras=(Lora(b"x", 1.0),)),
        replace(PLAIN_CONTEXT, build=b"x"),
        replace(PLAIN_CONTEXT, kv_overrides=(("x", "x"),)),
        replace(PLAIN_CONTEXT, tenant="x", loras=(Lora(b"x", 1.0),)),
    )
    assert len({ctx_params_hash(params) for params in settings}) == len(settings)
