"""Which model, in which context, gives these bytes of K and V their meaning?

    seed[65] = model_fp[32] || quant[1] || ctx_params_hash[32]

    model_fp          the content of the GGUF file, or of all files of a split one (`fingerprint`)
    quant             general.file_type of the GGUF, 255 where it is absent (`gguf_quant`)
    ctx_params_hash   SHA-256 of the parts below, in this order

    part = u8 tag | u32 length | value, little-endian

    tag name               value                        tag name               value
     00 encoding           "shmcache-ctx-1"              0B rope_freq_scale    f64
     01 n_ctx              i64, what llama.cpp gave      0C yarn_ext_factor    f64
     02 type_k             i64, ggml type                0D yarn_attn_factor   f64
     03 type_v             i64, ggml type                0E yarn_beta_fast     f64
     04 flash_attn         i64, llama.cpp's enum         0F yarn_beta_slow     f64
     05 swa_full           u8                            10 yarn_orig_ctx      i64
     06 n_seq_max          i64                           11 kv_overrides       override*, by key
     07 kv_unified         u8                            12 loras              (part 01: hash | f64 scale)*
     08 attention_type     i64                           13 control_vectors    (part 01: hash | f64 scale |
     09 rope_scaling_type  i64                                                 i64 first, i64 last layer)*
     0A rope_freq_base     f64                           14 build              32 bytes of `build_hash`
                                                         15 tenant             UTF-8; no tenant, no part

    override = part 01 key | part 02 i64, 03 f64, 04 u8 or 05 UTF-8, by the type of its value

A number is its exact bits (0.0 and -0.0 differ). Every part has its tag and its length, so no two settings
spell the same bytes: tenant "x" is not adapter "x". What changes rounding only is not in it: n_batch,
n_ubatch, threads, device.

A worked example, which the tests parse from this very page: a context of 2,048 cells with f16 K and V and
flash attention, one override, one adapter at scale 0.5, the tenant "acme".

    00 0e 00 00 00                                   encoding, 14 bytes
    73 68 6d 63 61 63 68 65 2d 63 74 78 2d 31        "shmcache-ctx-1"
    01 08 00 00 00 00 08 00 00 00 00 00 00           n_ctx 2048
    02 08 00 00 00 01 00 00 00 00 00 00 00           type_k 1
    03 08 00 00 00 01 00 00 00 00 00 00 00           type_v 1
    04 08 00 00 00 01 00 00 00 00 00 00 00           flash_attn 1
    05 01 00 00 00 01                                swa_full True
    06 08 00 00 00 01 00 00 00 00 00 00 00           n_seq_max 1
    07 01 00 00 00 00                                kv_unified False
    08 08 00 00 00 ff ff ff ff ff ff ff ff           attention_type -1
    09 08 00 00 00 ff ff ff ff ff ff ff ff           rope_scaling_type -1
    0a 08 00 00 00 00 00 00 00 00 00 00 00           rope_freq_base 0.0
    0b 08 00 00 00 00 00 00 00 00 00 00 00           rope_freq_scale 0.0
    0c 08 00 00 00 00 00 00 00 00 00 f0 bf           yarn_ext_factor -1.0
    0d 08 00 00 00 00 00 00 00 00 00 f0 3f           yarn_attn_factor 1.0
    0e 08 00 00 00 00 00 00 00 00 00 40 40           yarn_beta_fast 32.0
    0f 08 00 00 00 00 00 00 00 00 00 f0 3f           yarn_beta_slow 1.0
    10 08 00 00 00 00 00 00 00 00 00 00 00           yarn_orig_ctx 0
    11 27 00 00 00                                   kv_overrides, 39 bytes
    01 1c 00 00 00                                   part 01, 28 bytes
    74 6f 6b 65 6e 69 7a 65 72 2e 67 67 6d 6c 2e 61  "tokenizer.ggml.add_bos_token"
    64 64 5f 62 6f 73 5f 74 6f 6b 65 6e              …
    04 01 00 00 00 00                                part 04: False
    12 2d 00 00 00                                   loras, 45 bytes
    01 28 00 00 00                                   part 01, 40 bytes
    55 55 55 55 55 55 55 55 55 55 55 55 55 55 55 55  content hash
    55 55 55 55 55 55 55 55 55 55 55 55 55 55 55 55  …
    00 00 00 00 00 00 e0 3f                          scale 0.5
    13 00 00 00 00                                   control_vectors
    14 20 00 00 00                                   build, 32 bytes
    66 66 66 66 66 66 66 66 66 66 66 66 66 66 66 66  its hash
    66 66 66 66 66 66 66 66 66 66 66 66 66 66 66 66  …
    15 04 00 00 00 61 63 6d 65                       tenant "acme"

    SHA-256  ff52c46be7fcd4c42c3d1f098b38fc8fa2602854ae3bd864e2b90dab06ff9363

Owner: each process computes its own. The remembered hashes ($XDG_CACHE_HOME/shmcache/hashes.json or
~/.cache/shmcache/hashes.json, 0600 in a directory of 0700) are the user's; who writes them holds hashes.lock.
Readers: workers. The coordinator sees hashes only.

Invariants:
    I1  A remembered hash counts only for the same device, inode, size, mtime and ctime, which did not change
        while it was computed and lay in the past by then. mtime can be set back; ctime cannot.
    I2  Nothing about the remembered hashes can fail or change an answer: without them the file is hashed
        anew.

Leans on: the kernel moves ctime at every change of content. One tick of its clock may hold two changes, hence
"in the past".
Leaves out: whether the file that is hashed is the one that was loaded: take `file_state` before the load and
compare it with the one after the fingerprint.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import file_digest, sha256
from io import BufferedReader
from operator import itemgetter
from pathlib import Path
from struct import Struct
from typing import Annotated, Any, Literal

import msgspec
from filelock import BaseFileLock, FileLock

from shmcache.errors import ConfigError, ForeignObject
from shmcache.key import SEED_BYTES

NO_QUANT = 255
FingerprintMode = Literal["safe", "gguf_chunked", "fast_unsafe"]
AnyPath = str | os.PathLike[str]

_log = logging.getLogger(__name__)

_U8 = Struct("<B")
_U32 = Struct("<I")
_I64 = Struct("<q")
_U64 = Struct("<Q")
_F64 = Struct("<d")
_PART = Struct("<BI")


class Identity(msgspec.Struct, frozen=True):
    """A model in a context. Rows of two identities never meet."""

    model_fp: bytes  # 32 bytes
    quant: int  # general.file_type, 255 where absent
    ctx_params_hash: bytes  # 32 bytes

    @property
    def seed(self) -> bytes:
        """The 65 bytes that every key of this identity begins with."""
        seed = self.model_fp + bytes((self.quant,)) + self.ctx_params_hash
        assert len(seed) == SEED_BYTES
        return seed


# ---- the context


class Lora(msgspec.Struct, frozen=True):
    """A LoRA adapter as it is applied."""

    content_hash: bytes
    scale: float


class ControlVector(msgspec.Struct, frozen=True):
    """A control vector as it is applied, to layers first..last."""

    content_hash: bytes
    scale: float
    first_layer: int
    last_layer: int


class ContextParams(msgspec.Struct, frozen=True, kw_only=True):
    """What makes K/V bytes mean something else. Values are those that llama.cpp really uses."""

    n_ctx: int
    type_k: int
    type_v: int
    flash_attn: int
    swa_full: bool
    n_seq_max: int
    kv_unified: bool
    attention_type: int
    rope_scaling_type: int
    rope_freq_base: float
    rope_freq_scale: float
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_orig_ctx: int
    kv_overrides: tuple[tuple[str, bool | int | float | str], ...] = ()  # in any order
    loras: tuple[Lora, ...] = ()  # in the order of their application
    control_vectors: tuple[ControlVector, ...] = ()  # likewise
    build: bytes  # of the library, see build_hash
    tenant: str | None = None


def ctx_params_hash(params: ContextParams) -> bytes:
    """Return the 32 bytes that stand for a context in every key."""
    return sha256(b"".join(_context_parts(params))).digest()


def tenant_hash(tenant: str) -> bytes:
    """Return 16 bytes that name a tenant in a file, for accounts and eviction; no hit is decided by them."""
    return sha256(_part(0x15, _utf8(tenant))).digest()[:16]


def _context_parts(params: ContextParams) -> Iterator[bytes]:
    yield _part(0x00, b"shmcache-ctx-1")
    for tag, name, encode in _PARTS:
        value = getattr(params, name)
        if value is not None:
            yield _part(tag, encode(value))


def _part(tag: int, value: bytes) -> bytes:
    return _PART.pack(tag, len(value)) + value


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # one spelling for every str, also for odd file names


def _overrides(overrides: Iterable[tuple[str, bool | int | float | str]]) -> bytes:
    return b"".join(
        _part(0x01, _utf8(key)) + _override_value(value)
        for key, value in sorted(overrides, key=itemgetter(0))
    )


def _override_value(value: bool | int | float | str) -> bytes:
    if isinstance(value, bool):  # first: a bool is an int as well
        return _part(0x04, _U8.pack(value))
    if isinstance(value, int):
        return _part(0x02, _I64.pack(value))
    if isinstance(value, float):
        return _part(0x03, _F64.pack(value))
    return _part(0x05, _utf8(value))


def _loras(loras: Iterable[Lora]) -> bytes:
    return b"".join(_part(0x01, lora.content_hash + _F64.pack(lora.scale)) for lora in loras)


def _control_vectors(vectors: Iterable[ControlVector]) -> bytes:
    return b"".join(
        _part(
            0x01,
            vector.content_hash
            + _F64.pack(vector.scale)
            + _I64.pack(vector.first_layer)
            + _I64.pack(vector.last_layer),
        )
        for vector in vectors
    )


_PARTS: tuple[tuple[int, str, Callable[[Any], bytes]], ...] = (
    (0x01, "n_ctx", _I64.pack),
    (0x02, "type_k", _I64.pack),
    (0x03, "type_v", _I64.pack),
    (0x04, "flash_attn", _I64.pack),
    (0x05, "swa_full", _U8.pack),
    (0x06, "n_seq_max", _I64.pack),
    (0x07, "kv_unified", _U8.pack),
    (0x08, "attention_type", _I64.pack),
    (0x09, "rope_scaling_type", _I64.pack),
    (0x0A, "rope_freq_base", _F64.pack),
    (0x0B, "rope_freq_scale", _F64.pack),
    (0x0C, "yarn_ext_factor", _F64.pack),
    (0x0D, "yarn_attn_factor", _F64.pack),
    (0x0E, "yarn_beta_fast", _F64.pack),
    (0x0F, "yarn_beta_slow", _F64.pack),
    (0x10, "yarn_orig_ctx", _I64.pack),
    (0x11, "kv_overrides", _overrides),
    (0x12, "loras", _loras),
    (0x13, "control_vectors", _control_vectors),
    (0x14, "build", bytes),
    (0x15, "tenant", _utf8),
)


# ---- the model's content


class FileState(msgspec.Struct, frozen=True):
    """What the kernel says about a file: equal before and after means that it was not changed between."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


def file_state(path: AnyPath) -> FileState:
    """Return the state of the file at a path, links followed."""
    return _state(Path(path).stat())


def fingerprint(path: AnyPath, mode: FingerprintMode = "safe", memo_path: Path | None = None) -> bytes:
    """Return the 32-byte model_fp of a GGUF; a split one (`…-00001-of-00003.gguf`) by all its files.

        safe          SHA-256 of the content, remembered (`memo_path`: where; None: the user's own)
        gguf_chunked  size, first 16 MiB (the header) and 64 samples: may miss an edit
        fast_unsafe   path, size and mtime: misses a file that was swapped with its times kept

    Raises OSError for a file that cannot be read, ConfigError for one that does not hold still.
    """
    by_mode: dict[str, Callable[[Path], bytes]] = {
        "safe": partial(content_hash, memo_path=memo_path),
        "gguf_chunked": _sampled_hash,
        "fast_unsafe": _named_hash,
    }
    if mode not in by_mode:
        raise ConfigError(f"fingerprint mode {mode!r} is none of {', '.join(by_mode)}")
    digests = [by_mode[mode](part) for part in _split_files(Path(path))]
    return digests[0] if len(digests) == 1 else sha256(b"".join(digests)).digest()


def build_hash(lib_dir: AnyPath, memo_path: Path | None = None) -> bytes:
    """Return 32 bytes for the llama.cpp build: names and contents of libllama* and libggml*, by name."""
    lib_dir = Path(lib_dir)
    libraries = sorted((*lib_dir.glob("libllama*"), *lib_dir.glob("libggml*")))
    if not any(library.name.startswith("libllama") for library in libraries):
        raise ConfigError(f"no libllama* in {lib_dir}: the build of llama.cpp is unknown, and so is its K/V")
    return sha256(
        b"".join(
            _part(0x01, os.fsencode(library.name)) + _part(0x02, content_hash(library, memo_path))
            for library in libraries
        )
    ).digest()


_SPLIT_NAME = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


def _split_files(path: Path) -> list[Path]:
    """Return the files that llama.cpp loads with this one, by number; it refuses a model that lacks any."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if not match:
        return [path]
    stem, count = match.groups()
    files = [path.with_name(f"{stem}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    return [file for file in files if file == path or file.exists()] if path in files else [path]


_HEADER_SAMPLE_BYTES = 16 << 20
_SAMPLE_BYTES = 64 << 10
_SAMPLES = 64


def _sampled_hash(path: Path) -> bytes:
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        state = sha256(_part(0x01, b"gguf_chunked") + _part(0x02, _U64.pack(size_bytes)))
        state.update(file.read(_HEADER_SAMPLE_BYTES))
        last_offset = max(0, size_bytes - _SAMPLE_BYTES)
        for i in range(_SAMPLES):
            file.seek(last_offset * i // (_SAMPLES - 1))
            state.update(file.read(_SAMPLE_BYTES))
    return state.digest()


def _named_hash(path: Path) -> bytes:
    state = file_state(path)
    return sha256(
        _part(0x01, b"fast_unsafe")
        + _part(0x02, os.fsencode(path.resolve()))
        + _part(0x03, _U64.pack(state.size_bytes) + _I64.pack(state.mtime_ns))
    ).digest()


def content_hash(path: AnyPath, memo_path: Path | None = None) -> bytes:
    """Return the SHA-256 of a file, remembered: a model, an adapter, a control vector, a library."""
    memo = _Memo(memo_path)
    with Path(path).open("rb") as file:
        known = memo.recall(_state_of(file))
        if known is not None:
            return known
        with memo.turn() as has_turn:
            known = memo.recall(_state_of(file))  # by the process whose turn it was before
            if known is not None:
                return known
            began_ns = time.time_ns()
            state, digest = _hash_at_rest(file)
            if has_turn and began_ns - state.ctime_ns > _SETTLED_NS:
                memo.remember(state, digest)
            return digest


_HASH_ATTEMPTS = 3


def _hash_at_rest(file: BufferedReader) -> tuple[FileState, bytes]:
    for _ in range(_HASH_ATTEMPTS):
        before = _state_of(file)
        file.seek(0)
        digest = file_digest(file, "sha256").digest()
        if _state_of(file) == before:
            return before, digest
    raise ConfigError(
        f"{file.name} changed during each of {_HASH_ATTEMPTS} attempts to hash it: "
        f"write it under another name, then rename it"
    )


def _state_of(file: BufferedReader) -> FileState:
    return _state(os.fstat(file.fileno()))


def _state(status: os.stat_result) -> FileState:
    return FileState(
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        inode=status.st_ino,
        device=status.st_dev,
    )


_SETTLED_NS = 2_000_000_000  # the coarsest clock of a file system in use ticks every two seconds
_TURN_S = 60.0  # longer than most models take to hash; after it each process hashes for itself
_MAX_REMEMBERED = 256


class _Remembered(msgspec.Struct, frozen=True):
    state: FileState
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Memo:
    """The remembered hashes, one JSON object by device and inode, replaced as a whole.

    Every fault in here means "not remembered" (I2): hence the bare `except Exception`.
    """

    def __init__(self, path: Path | None) -> None:
        self._given_path = path

    def recall(self, state: FileState) -> bytes | None:
        known = self._entries().get(_file_id(state))
        return bytes.fromhex(known.sha256) if known is not None and known.state == state else None

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """One process hashes while the others wait for what it remembers; False: there are no turns here."""
        lock = self._acquired_lock()
        try:
            yield lock is not None
        finally:
            if lock is not None:
                with suppress(Exception):
                    lock.release()

    def _acquired_lock(self) -> BaseFileLock | None:
        try:
            folder = self._path().parent
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_foreign(folder, folder.lstat(), stat.S_ISDIR)
            lock = FileLock(self._path().with_suffix(".lock"), timeout=_TURN_S, mode=0o600)
            lock.acquire()
        except Exception as fault:
            _log.info("hashes are not remembered: %s", fault)
            return None
        return lock

    def remember(self, state: FileState, digest: bytes) -> None:
        """Add an entry, in our turn; the oldest ones leave."""
        entries = self._entries()
        entries.pop(_file_id(state), None)
        entries[_file_id(state)] = _Remembered(state, digest.hex())
        kept = dict(list(entries.items())[-_MAX_REMEMBERED:])
        try:
            fresh = self._path().with_suffix(".new")
            fresh.unlink(missing_ok=True)
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, 0o600)  # whatever the umask
                file.write(msgspec.json.encode(kept))
            fresh.replace(self._path())
        except Exception as fault:
            _log.info("a hash is not remembered: %s", fault)

    def _entries(self) -> dict[str, _Remembered]:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(self._path(), flags), "rb") as file:
                _refuse_foreign(self._path(), os.fstat(file.fileno()), stat.S_ISREG)
                return msgspec.json.decode(file.read(), type=dict[str, _Remembered])
        except FileNotFoundError:
            return {}
        except Exception as fault:
            _log.info("the remembered hashes are not used: %s", fault)
            return {}

    def _path(self) -> Path:
        if self._given_path is not None:
            return self._given_path
        cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not cache_home.is_absolute():  # unset, or relative and so to be ignored (XDG base directories)
            cache_home = Path.home() / ".cache"
        return cache_home / "shmcache" / "hashes.json"


def _file_id(state: FileState) -> str:
    return f"{state.device}:{state.inode}"


def _refuse_foreign(path: Path, status: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not is_kind(status.st_mode):
        raise ForeignObject(str(path), status.st_uid, stat.S_IMODE(status.st_mode))


# ---- general.file_type of a GGUF
#
#     "GGUF" | u32 version | u64 tensors | u64 pairs | (u64 length, key | u32 type | value)* …
#     string: u64 length, bytes      array: u32 type of its elements | u64 count | elements

_FILE_TYPE_KEY = b"general.file_type"
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    4: Struct("<I"),
    5: Struct("<i"),
    6: Struct("<f"),
    7: Struct("<?"),
    10: Struct("<Q"),
    11: Struct("<q"),
    12: Struct("<d"),
}
_FLOATS = (6, 12)

# llama.cpp's enum llama_ftype; the bits per weight are the first number of a name
_QUANT_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K",
    19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL",
    26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0",
    37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip


def quant_name(quant: int) -> str:
    """Return the name people know, `Q4_K_M`; empty where the number has none."""
    return _QUANT_NAMES.get(quant, "")


def quant_bits(quant: int) -> int:
    """Return the bits per weight that the name promises, 0 where there is none."""
    number = re.search(r"\d+", quant_name(quant))
    return int(number.group()) if number else 0


def gguf_quant(path: AnyPath) -> int:
    """Return general.file_type of a GGUF, 255 where it is absent or cannot be found.

    A GGUF whose header is damaged is llama.cpp's to refuse; its content is in model_fp in any case. A file
    that is no GGUF at all is a ConfigError.
    """
    with Path(path).open("rb") as file:
        magic = file.read(4)
        if magic != b"GGUF":
            raise ConfigError(f"{path} is not a GGUF file: it begins with {magic!r}")
        try:
            quant = _file_type(_GgufHeader(file))
        except _DamagedHeader:
            quant = None
    return quant if quant is not None and 0 <= quant < NO_QUANT else NO_QUANT


class _DamagedHeader(Exception):
    pass


def _file_type(header: _GgufHeader) -> int | None:
    version = header.scalar(_U32)
    if version not in (2, 3):  # 1 has shorter lengths, and llama.cpp does not read it
        return None
    header.skip(_U64.size)  # tensors
    for _ in range(header.scalar(_U64)):
        is_wanted = header.string() == _FILE_TYPE_KEY
        kind = header.scalar(_U32)
        if is_wanted:
            return int(header.scalar(_SCALARS[kind])) if kind in _SCALARS and kind not in _FLOATS else None
        header.skip_value(kind)
    return None


class _GgufHeader:
    """Reads behind the magic; every length is held against the file's size before it is used."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self._left_bytes = os.fstat(file.fileno()).st_size - file.tell()

    def scalar(self, form: Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def string(self) -> bytes:
        return self._take(self.scalar(_U64))

    def skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self.skip(self.scalar(_U64))
        elif kind == _ARRAY:
            self._skip_array()
        else:
            self.skip(self._scalar_bytes(kind))

    def _skip_array(self) -> None:
        kind, count = self.scalar(_U32), self.scalar(_U64)
        if kind != _STRING:  # an array of arrays has no size here, and llama.cpp reads none
            self.skip(count * self._scalar_bytes(kind))
            return
        for _ in range(count):
            self.skip(self.scalar(_U64))

    def _scalar_bytes(self, kind: int) -> int:
        if kind not in _SCALARS:
            raise _DamagedHeader
        return _SCALARS[kind].size

    def skip(self, size_bytes: int) -> None:
        self._claim(size_bytes)
        self._file.seek(size_bytes, os.SEEK_CUR)

    def _take(self, size_bytes: int) -> bytes:
        self._claim(size_bytes)
        taken = self._file.read(size_bytes)
        if len(taken) != size_bytes:
            raise _DamagedHeader
        return taken

    def _claim(self, size_bytes: int) -> None:
        if size_bytes > self._left_bytes:
            raise _DamagedHeader
        self._left_bytes -= size_bytes
