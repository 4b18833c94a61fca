"""shmcache.identity: context hashes, fingerprints and what is remembered of them, the quant of a GGUF."""

from __future__ import annotations

import os
import re
import struct
import threading
from hashlib import sha256
from pathlib import Path

import gguf
import msgspec
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support import PLAIN_CONTEXT

from shmcache import identity
from shmcache.errors import ConfigError
from shmcache.identity import ContextParams, ControlVector, Identity, Lora
from shmcache.key import SEED_BYTES

# ---- the context

WORKED = replace(
    PLAIN_CONTEXT,
    flash_attn=1,
    kv_overrides=(("tokenizer.ggml.add_bos_token", False),),
    loras=(Lora(b"\x55" * 32, 0.5),),
    tenant="acme",
)


def differ(*settings: ContextParams) -> bool:
    return len({identity.ctx_params_hash(params) for params in settings}) == len(settings)


def test_the_worked_example_has_the_hash_that_the_page_gives() -> None:
    page = identity.__doc__ or ""
    lines = re.findall(r"^    ((?:[0-9a-f]{2} ){0,15}[0-9a-f]{2}) +\S", page, re.M)
    stated = re.findall(r"^    SHA-256  ([0-9a-f]{64})$", page, re.M)
    assert [sha256(bytes.fromhex("".join(lines))).hexdigest()] == stated
    assert identity.ctx_params_hash(WORKED).hex() == stated[0]


OTHER_VALUES: dict[type, list[object]] = {
    bool: [False, True],
    int: [-7, 3, 1 << 40],
    float: [0.0, -0.0, 1e-45, float("inf"), float("nan")],
    bytes: [b"", b"\x67" * 32],
    str: ["", "acmf"],
}
OTHER_SEQUENCES = {
    "kv_overrides": [
        (),
        (("a", 1),),
        (("a", 1.0),),
        (("a", True),),
        (("a", "1"),),
        (("b", 1),),
        (("a", 1), ("b", 1)),
    ],
    "loras": [
        (),
        (Lora(b"\x55" * 32, 1.0),),
        (Lora(b"\x56" * 32, 0.5),),
        (Lora(b"\x55" * 32, 0.5), Lora(b"\x56" * 32, 0.5)),
        (Lora(b"\x56" * 32, 0.5), Lora(b"\x55" * 32, 0.5)),
    ],
    "control_vectors": [
        (),
        (ControlVector(b"\x55" * 32, 0.5, 1, 30),),
        (ControlVector(b"\x55" * 32, 0.6, 1, 30),),
        (ControlVector(b"\x55" * 32, 0.5, 2, 30),),
        (ControlVector(b"\x55" * 32, 0.5, 1, 29),),
    ],
}


@pytest.mark.parametrize("name", ContextParams.__struct_fields__)
def test_every_field_is_in_the_hash(name: str) -> None:
    others = OTHER_SEQUENCES.get(name) or OTHER_VALUES[type(getattr(WORKED, name))]
    assert differ(*(replace(WORKED, **{name: value}) for value in others))


def test_the_order_of_overrides_does_not_matter_and_that_of_adapters_does() -> None:
    pairs = (("a", 1), ("b", 2))
    loras = (Lora(b"\x55" * 32, 1.0), Lora(b"\x56" * 32, 1.0))
    assert not differ(replace(WORKED, kv_overrides=pairs), replace(WORKED, kv_overrides=pairs[::-1]))
    assert differ(replace(WORKED, loras=loras), replace(WORKED, loras=loras[::-1]))


numbers = st.integers(-(2**63), 2**63 - 1)
short = st.binary(max_size=3)
settings_of_one_kind = st.builds(
    lambda overrides, loras, build, tenant: replace(
        WORKED, kv_overrides=tuple(overrides), loras=tuple(loras), build=build, tenant=tenant
    ),
    st.lists(
        st.tuples(st.text(max_size=2), st.booleans() | numbers | st.floats() | st.text(max_size=2)),
        max_size=2,
        unique_by=lambda pair: pair[0],
    ),
    st.lists(st.builds(Lora, short, st.floats()), max_size=2),
    short,
    st.none() | st.text(max_size=3),
)


def spelled(params: ContextParams) -> tuple[object, ...]:
    """The settings with floats as bits and types beside values: equal only if they mean the same."""

    def exact(value: object) -> tuple[str, object]:
        bits = struct.pack("<d", value) if isinstance(value, float) else value
        return type(value).__name__, bits

    overrides = tuple((key, exact(value)) for key, value in sorted(params.kv_overrides))
    loras = tuple((lora.content_hash, exact(lora.scale)) for lora in params.loras)
    return overrides, loras, params.build, params.tenant


@given(settings_of_one_kind, settings_of_one_kind)
def test_two_settings_never_spell_the_same_bytes(one: ContextParams, other: ContextParams) -> None:
    assert (identity.ctx_params_hash(one) == identity.ctx_params_hash(other)) == (
        spelled(one) == spelled(other)
    )


def test_a_seed_is_model_quant_and_context() -> None:
    seed = Identity(model_fp=b"m" * 32, quant=3, ctx_params_hash=b"c" * 32).seed
    assert seed == b"m" * 32 + b"\x03" + b"c" * 32
    assert len(seed) == SEED_BYTES


def test_a_tenant_hash_is_sixteen_bytes_of_the_tenant_alone() -> None:
    assert len(identity.tenant_hash("acme")) == 16
    assert len({identity.tenant_hash(name) for name in ("", "acme", "acmf", "\udcff")}) == 4


# ---- fingerprints


@pytest.fixture
def memo(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "hashes.json"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as settled at once; the test for young files waits as people do."""
    monkeypatch.setattr(identity, "_SETTLED_NS", 0)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(200_000))
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were really hashed."""
    names: list[str] = []
    hash_at_rest = identity._hash_at_rest

    def counted(file: object) -> object:
        names.append(Path(file.name).name)
        return hash_at_rest(file)

    monkeypatch.setattr(identity, "_hash_at_rest", counted)
    return names


def test_the_safe_fingerprint_is_the_sha256_of_the_file(model: Path, memo: Path) -> None:
    assert identity.fingerprint(model, memo_path=memo) == sha256(model.read_bytes()).digest()


def test_a_file_is_hashed_once(model: Path, memo: Path, hashed: list[str]) -> None:
    first = identity.fingerprint(model, memo_path=memo)
    link = model.with_name("link.gguf")
    link.symlink_to(model)
    assert identity.fingerprint(model, memo_path=memo) == first
    assert identity.fingerprint(link, memo_path=memo) == first
    assert hashed == ["model.gguf"]


def test_a_file_that_was_just_written_is_not_remembered(
    model: Path, memo: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_SETTLED_NS", 3600 * 10**9)
    assert identity.fingerprint(model, memo_path=memo) == identity.fingerprint(model, memo_path=memo)
    assert len(hashed) == 2


def test_an_edit_with_size_and_mtime_kept_is_seen(model: Path, memo: Path) -> None:
    before = identity.fingerprint(model, memo_path=memo)
    status = model.stat()
    with model.open("r+b") as file:
        file.seek(100_000)
        file.write(b"\x01")
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (model.stat().st_size, model.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert identity.fingerprint(model, memo_path=memo) == sha256(model.read_bytes()).digest() != before


def test_a_file_swapped_at_the_same_path_is_seen(model: Path, memo: Path) -> None:
    before = identity.fingerprint(model, memo_path=memo)
    status = model.stat()
    other = model.with_name("other")
    other.write_bytes(b"GGUF" + b"\x01" * 200_000)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    state = identity.file_state(model)
    other.replace(model)
    assert identity.fingerprint(model, memo_path=memo) == sha256(model.read_bytes()).digest() != before
    assert identity.file_state(model) != state


def test_a_file_that_changes_while_it_is_hashed_is_hashed_again(
    model: Path, memo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = identity.file_digest
    changes = iter([b"one", b"two"])

    def changing(file: object, name: str) -> object:
        digest = real(file, name)
        change = next(changes, None)
        if change is not None:
            model.write_bytes(change)
        return digest

    monkeypatch.setattr(identity, "file_digest", changing)
    assert identity.fingerprint(model, memo_path=memo) == sha256(b"two").digest()


def test_a_file_that_never_rests_is_a_config_error(
    model: Path, memo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = identity.file_digest

    def changing(file: object, name: str) -> object:
        digest = real(file, name)
        model.write_bytes(model.read_bytes() + b"x")
        return digest

    monkeypatch.setattr(identity, "file_digest", changing)
    with pytest.raises(ConfigError, match=r"model\.gguf changed during each of 3 attempts"):
        identity.fingerprint(model, memo_path=memo)


def test_a_missing_model_is_an_os_error(tmp_path: Path, memo: Path) -> None:
    for mode in ("safe", "gguf_chunked", "fast_unsafe"):
        with pytest.raises(FileNotFoundError):
            identity.fingerprint(tmp_path / "none.gguf", mode, memo)


def test_an_unknown_mode_is_a_config_error(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"'fast' is none of safe, gguf_chunked, fast_unsafe"):
        identity.fingerprint(model, "fast")  # type: ignore[arg-type]


def test_the_modes_say_different_things_and_see_what_they_promise(model: Path, memo: Path) -> None:
    modes = ("safe", "gguf_chunked", "fast_unsafe")
    before = {mode: identity.fingerprint(model, mode, memo) for mode in modes}
    assert len(set(before.values())) == 3
    status = model.stat()
    model.write_bytes(b"GGUF" + b"\x01" * 200_000)
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = {mode: identity.fingerprint(model, mode, memo) for mode in modes}
    assert [mode for mode in modes if before[mode] == after[mode]] == ["fast_unsafe"]
    os.utime(model)
    assert identity.fingerprint(model, "fast_unsafe") != before["fast_unsafe"]


def test_samples_see_size_head_and_tail(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    size_bytes = 40 << 20

    def sampled(size_bytes: int = size_bytes, at: int | None = None) -> bytes:
        with path.open("wb") as file:
            file.truncate(size_bytes)
            if at is not None:
                file.seek(at)
                file.write(b"\x01")
        return identity.fingerprint(path, "gguf_chunked")

    plain = sampled()
    assert sampled(size_bytes + 1) != plain
    assert sampled(at=(16 << 20) - 1) != plain
    assert sampled(at=size_bytes - 1) != plain
    assert sampled(at=(16 << 20) + (70 << 10)) == plain  # between two samples: why it is not the default


def test_all_files_of_a_split_model_are_in_its_fingerprint(tmp_path: Path, memo: Path) -> None:
    files = [tmp_path / f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    for file in files:
        file.write_bytes(file.name.encode())
    for mode in ("safe", "gguf_chunked"):
        before = identity.fingerprint(files[0], mode, memo)
        files[2].write_bytes(b"another last file")
        assert identity.fingerprint(files[0], mode, memo) != before
        files[2].write_bytes(files[2].name.encode())
        assert identity.fingerprint(files[0], mode, memo) == before
    files[0].unlink()
    with pytest.raises(FileNotFoundError):
        identity.fingerprint(files[0], memo_path=memo)


# ---- what is remembered


def test_the_remembered_hashes_are_private(model: Path, memo: Path) -> None:
    old_umask = os.umask(0)
    try:
        identity.fingerprint(model, memo_path=memo)
    finally:
        os.umask(old_umask)
    assert memo.parent.stat().st_mode & 0o777 == 0o700
    assert memo.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in memo.parent.iterdir()) == ["hashes.json", "hashes.lock"]


def test_they_lie_in_the_cache_folder_of_the_user(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    identity.fingerprint(model)
    assert (tmp_path / "home" / ".cache" / "shmcache" / "hashes.json").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    identity.fingerprint(model)
    assert (tmp_path / "xdg" / "shmcache" / "hashes.json").exists()


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"1:2": 3}', b'{"1:2": {"state": {}, "sha256": "00"}}', b"[" * 100_000],
)
def test_a_damaged_memory_is_replaced(model: Path, memo: Path, hashed: list[str], damage: bytes) -> None:
    expected = identity.fingerprint(model, memo_path=memo)
    memo.write_bytes(damage)
    assert identity.fingerprint(model, memo_path=memo) == expected
    assert identity.fingerprint(model, memo_path=memo) == expected
    assert len(hashed) == 2


@pytest.mark.parametrize("field", identity.FileState.__struct_fields__)
def test_an_entry_counts_only_if_all_that_the_kernel_says_is_equal(
    model: Path, memo: Path, hashed: list[str], field: str
) -> None:
    expected = identity.fingerprint(model, memo_path=memo)
    entries = msgspec.json.decode(memo.read_bytes())
    for entry in entries.values():
        entry["state"][field] += 1
        entry["sha256"] = "00" * 32
    memo.write_bytes(msgspec.json.encode(entries))
    assert identity.fingerprint(model, memo_path=memo) == expected
    assert len(hashed) == 2


def test_a_memory_with_other_permissions_or_behind_a_link_is_not_read(
    model: Path, memo: Path, hashed: list[str]
) -> None:
    expected = identity.fingerprint(model, memo_path=memo)
    forged = memo.read_bytes().replace(expected.hex().encode(), b"00" * 32)

    memo.write_bytes(forged)
    memo.chmod(0o622)
    assert identity.fingerprint(model, memo_path=memo) == expected
    assert memo.stat().st_mode & 0o777 == 0o600

    planted = memo.with_name("planted")
    planted.write_bytes(forged)
    planted.chmod(0o600)
    memo.unlink()
    memo.symlink_to(planted)
    assert identity.fingerprint(model, memo_path=memo) == expected
    assert not memo.is_symlink()
    assert planted.read_bytes() == forged
    assert len(hashed) == 3


def test_a_folder_of_others_is_left_alone(model: Path, memo: Path, hashed: list[str]) -> None:
    memo.parent.mkdir()
    memo.parent.chmod(0o755)
    assert identity.fingerprint(model, memo_path=memo) == identity.fingerprint(model, memo_path=memo)
    assert len(hashed) == 2
    assert list(memo.parent.iterdir()) == []


@pytest.mark.parametrize("obstacle", ["hashes.json", "hashes.lock", "hashes.new"])
def test_a_directory_in_the_way_costs_a_hash_and_no_exception(
    model: Path, memo: Path, hashed: list[str], obstacle: str
) -> None:
    memo.parent.mkdir(mode=0o700)
    (memo.parent / obstacle / "full").mkdir(parents=True)
    assert identity.fingerprint(model, memo_path=memo) == identity.fingerprint(model, memo_path=memo)
    assert len(hashed) == 2


def test_without_a_home_a_file_is_hashed_each_time(
    model: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(identity.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert identity.fingerprint(model) == identity.fingerprint(model)
    assert len(hashed) == 2


def test_the_oldest_entries_leave(
    model: Path, memo: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_MAX_REMEMBERED", 2)
    files = [model.with_name(name) for name in "abc"]
    for file in files:
        file.write_bytes(file.name.encode())
        identity.content_hash(file, memo)
    for file in reversed(files):
        identity.content_hash(file, memo)
    assert hashed == ["a", "b", "c", "a"]


def test_one_hashes_while_the_others_wait(model: Path, memo: Path, hashed: list[str]) -> None:
    memo.parent.mkdir(mode=0o700)
    answers: list[bytes] = []
    with FileLock(memo.with_suffix(".lock"), mode=0o600):
        threads = [
            threading.Thread(target=lambda: answers.append(identity.content_hash(model, memo)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert answers == []
    for thread in threads:
        thread.join()
    assert answers == [sha256(model.read_bytes()).digest()] * 3
    assert len(hashed) == 1


def test_whoever_waits_too_long_hashes_for_itself(
    model: Path, memo: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_TURN_S", 0.05)
    memo.parent.mkdir(mode=0o700)
    with FileLock(memo.with_suffix(".lock"), mode=0o600):
        assert identity.content_hash(model, memo) == sha256(model.read_bytes()).digest()
    assert not memo.exists()


# ---- the build


def test_a_build_is_all_its_libraries_by_name(tmp_path: Path, memo: Path) -> None:
    def build(**libraries: bytes) -> bytes:
        folder = tmp_path / "lib"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for name, content in libraries.items():
            (folder / f"lib{name}.so").write_bytes(content)
        return identity.build_hash(folder, memo)

    plain = build(llama=b"1", ggml=b"2", mtmd=b"3")
    assert build(llama=b"1", ggml=b"2", mtmd=b"4") == plain  # image handlers do not touch K/V
    assert len({plain, build(llama=b"2", ggml=b"1"), build(llama=b"1", ggml=b"3"), build(llama=b"1")}) == 4


def test_a_folder_without_the_library_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "libggml.so").write_bytes(b"")
    with pytest.raises(ConfigError, match=re.escape(f"no libllama* in {tmp_path}")):
        identity.build_hash(tmp_path)


# ---- GGUF


def gguf_file(path: Path, file_type: int | None, *, tokens: int = 3) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "tiny")
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_token_list([f"token{i}" for i in range(tokens)])
    writer.add_float64("a.double", 1.0)
    writer.add_bool("a.flag", True)
    if file_type is not None:
        writer.add_file_type(file_type)
    writer.add_uint64("z.last", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("file_type", "quant"), [(0, 0), (3, 3), (254, 254), (255, 255), (1024, 255), (None, 255)]
)
def test_the_quant_is_the_file_type_or_255(tmp_path: Path, file_type: int | None, quant: int) -> None:
    assert identity.gguf_quant(gguf_file(tmp_path / "m.gguf", file_type)) == quant


@pytest.mark.parametrize("content", [b"", b"GGU", b"GGML" + bytes(60)])
def test_what_is_no_gguf_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"m\.bin is not a GGUF file"):
        identity.gguf_quant(path)


def test_a_header_cut_anywhere_has_no_quant(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", 3)
    whole = path.read_bytes()
    found_from = whole.index(b"general.file_type") + len(b"general.file_type") + 8
    for length in range(4, len(whole)):
        path.write_bytes(whole[:length])
        assert identity.gguf_quant(path) == (3 if length >= found_from else 255), length


@given(st.integers(4, 400), st.binary(min_size=1, max_size=8))
def test_a_header_of_junk_is_read_without_harm(
    tmp_path_factory: pytest.TempPathFactory, at: int, junk: bytes
) -> None:
    path = gguf_file(tmp_path_factory.getbasetemp() / "junk.gguf", 3)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(junk)
    assert 0 <= identity.gguf_quant(path) <= 255


@pytest.mark.parametrize(
    "pair",
    [
        struct.pack("<IQQ", 9, 9, 1 << 60),  # an array of arrays
        struct.pack("<IIQ", 9, 8, 1 << 60),  # more strings than the file has bytes
        struct.pack("<IIQ", 9, 4, 1 << 62),
        struct.pack("<IQ", 8, 1 << 63),
        struct.pack("<I", 99),
    ],
)
def test_lengths_beyond_the_file_are_not_followed(tmp_path: Path, pair: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + struct.pack("<Q", 1) + b"k" + pair + bytes(50)
    )
    assert identity.gguf_quant(path) == 255


def test_a_file_type_that_is_no_integer_is_none(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    key = b"general.file_type"
    for kind, value in (
        (6, struct.pack("<f", 3.0)),
        (8, struct.pack("<Q", 1) + b"3"),
        (5, struct.pack("<i", -1)),
    ):
        pair = struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
        assert identity.gguf_quant(path) == 255


def test_the_names_of_quants_are_those_of_llama_cpp() -> None:
    theirs = {kind.value: kind.name for kind in gguf.LlamaFileType if kind is not gguf.LlamaFileType.GUESSED}
    ours = {quant: identity.quant_name(quant) for quant in range(256) if identity.quant_name(quant)}
    for quant, name in theirs.items():
        assert ours.get(quant, name) == name.removeprefix("ALL_").removeprefix("MOSTLY_")
    assert [identity.quant_bits(quant) for quant in (0, 3, 7, 32, 36, 38, 255)] == [32, 4, 8, 16, 1, 4, 0]


def test_the_quant_of_the_real_model(smollm2: Path) -> None:
    assert identity.gguf_quant(smollm2) == 3
    assert identity.quant_name(3) == "Q4_1"
