"""What the tests of the core share: rows to save, processes to kill, and a namespace that cleans up.

    Namespace   a coordinator in a process of its own, caches in this one, children; all gone at the end
    Child       a forked process that runs one function and talks in lines, so that races are stepped
    Text, plan, meta, save, slab_file    rows with random payloads under a given identity

Nothing here sleeps for a fixed time: `eventually` asks again until a bound has passed.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import logging
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from hashlib import sha256
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest
from crc32c import crc32c
from msgspec.structs import replace

from shmcache import client, kvc, mq, server
from shmcache.client import Cache, SavePlan, attach
from shmcache.decisions import db
from shmcache.identity import ContextParams, Identity
from shmcache.key import PrefixWalk, row_address
from shmcache.shm import SHM_ROOT, Names

ROOT = Path(__file__).parents[1]
TOKENS = 100
PIECES = (kvc.Piece(TOKENS, 1, 512, 1, 0),)
TOKEN_IDS = memoryview(array.array("I", range(TOKENS))).cast("B")
PAYLOAD_OFFSET = kvc.head_bytes(TOKENS, len(PIECES))
WAIT_S = 20.0
"""How long anything may take before a test fails; nothing is expected to come near."""

# A busy machine is no reason to skip a save that a test is about.
client.RESERVE_TIMEOUT_MS = int(WAIT_S * 1000)
client._ANSWER_NS = int(WAIT_S * 1e9)

PLAIN_CONTEXT = ContextParams(
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
"""A context without adapters, overrides or a tenant."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a second uid or a mount of its own")

_Answer = TypeVar("_Answer")
_numbers = iter(range(1 << 30))


# ---- rows


def identity(name: str = "model") -> Identity:
    """A model in a context, by any name."""
    return Identity(sha256(name.encode()).digest(), 2, sha256(b"context").digest())


def prompt(size_bytes: int, name: str = "prompt") -> bytes:
    """Bytes that differ in every block; the same for the same name, so prefixes of one another."""
    blocks = range(-(-size_bytes // 32))
    return b"".join(sha256(f"{name}{block}".encode()).digest() for block in blocks)[:size_bytes]


def plan(who: Identity, text: bytes, payload_bytes: int = 4096) -> SavePlan:
    """What a worker reserves for this text."""
    return SavePlan(
        address=row_address(who.seed, text),
        text_bytes=len(text),
        payload_offset=PAYLOAD_OFFSET,
        payload_bytes=payload_bytes,
    )


def unknown_plan(payload_bytes: int = 4096) -> SavePlan:
    """What a worker reserves for a reply in the making."""
    return SavePlan(address=None, text_bytes=0, payload_offset=PAYLOAD_OFFSET, payload_bytes=payload_bytes)


def meta(who: Identity, text: bytes, **changes: Any) -> kvc.Meta:
    """Metadata of the row of this text."""
    address = row_address(who.seed, text)
    made = kvc.Meta(
        quant_bits=4,
        save_reason=kvc.Reason.COLD,
        token_count=TOKENS,
        context_size=512,
        created_unix_s=1_700_000_000,
        last_used_unix_s=1_700_000_000,
        model_fp=who.model_fp,
        fingerprint_mode="safe",
        quant_name="q4",
        ctx_params_hash=who.ctx_params_hash,
        hostname="host",
        shmcache_version="0",
        reason_detail="",
        text_bytes=len(text),
        key=address.key,
        block_key=address.block_key,
        n_swa=0,
        pos_min=0,
        rewindable=True,
    )
    return replace(made, **changes)


def slab_file(who: Identity, text: bytes, payload: bytes = b"", **changes: Any) -> bytes:
    """The bytes of a whole slab, made as a worker makes it."""
    head = kvc.encode_head(
        meta(who, text, **changes),
        PIECES,
        TOKEN_IDS,
        len(payload),
        crc32c(payload),
        payload_offset=PAYLOAD_OFFSET,
    )
    return head + payload


def save(
    cache: Cache, who: Identity, text: bytes, payload: bytes, base: bytes | None = None, **changes: Any
) -> bool:
    """Reserve, write and hand over one row, and wait for its outcome: whether it is published."""
    (slab,) = cache.reserve([plan(who, text, len(payload))], base, cache.forget).slabs
    if slab is None:
        return False
    slab.payload(len(payload))[:] = payload
    slab.save(meta(who, text, base_key=base, **changes), PIECES, TOKEN_IDS)
    return slab.wait(int(WAIT_S * 1000))


def longest(cache: Cache, who: Identity, text: bytes) -> tuple[int, bytes] | None:
    """Length and payload of the longest row that is a prefix of the text."""
    for hit in cache.candidates(PrefixWalk(who.seed, text), len(text)):
        return hit.found.row.text_bytes, bytes(hit.image.payload)
    return None


def payload_of(cache: Cache, who: Identity, text: bytes) -> bytes | None:
    """The payload of exactly this row, or None."""
    hit = cache.get(row_address(who.seed, text).key)
    return bytes(hit.image.payload) if hit is not None else None


def unnamed_slabs() -> int:
    """How many files without a name in /dev/shm this process has open: other programs have theirs."""
    count = 0
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 (numbers)
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            found = os.fstat(fd)
            is_there = found.st_dev == SHM_ROOT.stat().st_dev and stat.S_ISREG(found.st_mode)
            count += is_there and found.st_nlink == 0
    return count


# ---- waiting


def eventually(condition: Callable[[], _Answer], within_s: float = WAIT_S) -> _Answer:
    """Ask again until the answer is true; the answer. Fails when the bound has passed."""
    until_s = time.monotonic() + within_s
    while not (answer := condition()):
        assert time.monotonic() < until_s, f"{condition} stayed {answer!r} for {within_s} s"
        time.sleep(0.005)
    return answer


# ---- processes


class Pipe:
    """One end of a conversation in lines of JSON."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._unread = b""

    def say(self, value: object = None) -> None:
        """Send a line."""
        os.write(self._writer, json.dumps(value).encode() + b"\n")

    def hear(self, is_over: Callable[[], bool] = lambda: False, within_s: float = WAIT_S) -> Any:
        """The next line. Fails where the other side has ended, or says nothing for so long."""
        until_s = time.monotonic() + within_s
        while b"\n" not in self._unread:
            over = is_over()
            if select.select([self._reader], [], [], 0.02)[0]:
                chunk = os.read(self._reader, 65_536)
                assert chunk, "the other side has closed the pipe"
                self._unread += chunk
                continue
            assert not over, "the other side has ended and said nothing"
            assert time.monotonic() < until_s, f"nothing was said for {within_s} s"
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Close this end."""
        os.close(self._reader)
        os.close(self._writer)


class Child:
    """A forked process that runs `function(pipe, *arguments)` and leaves with 0, or 1 if it raised."""

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: object,
        uid: int | None = None,
        streams: tuple[int, int] | None = None,
    ) -> None:
        """Fork. As another uid if asked; stdout and stderr go where `streams` says."""
        ours, theirs = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(Pipe(theirs[0], ours[1]), function, arguments, uid, streams)
        os.close(ours[1])
        os.close(theirs[0])
        self._pipe = Pipe(ours[0], theirs[1])
        self._code: int | None = None

    @staticmethod
    def _run(
        pipe: Pipe,
        function: Callable[..., object],
        arguments: tuple[object, ...],
        uid: int | None,
        streams: tuple[int, int] | None,
    ) -> None:
        code = 1
        try:
            # Of pytest's capturing nothing may stay: its streams and handlers are the parent's.
            logging.root.handlers.clear()
            if streams is not None:
                os.dup2(streams[0], 1)
                os.dup2(streams[1], 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            result = function(pipe, *arguments)
            code = result if isinstance(result, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def say(self, value: object = None) -> None:
        """Let the child go on."""
        self._pipe.say(value)

    def hear(self, within_s: float = WAIT_S) -> Any:
        """What the child says next."""
        return self._pipe.hear(lambda: self.poll() is not None, within_s)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, within_s: float = WAIT_S) -> int:
        """Wait for its end; its exit code."""
        eventually(lambda: self.poll() is not None, within_s)
        assert self._code is not None
        return self._code

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        """Nothing of it is left."""
        self.kill()
        self._pipe.close()


def die(*_: object) -> None:
    """kill -9 of this very process."""
    os.kill(os.getpid(), signal.SIGKILL)


def in_small_shm(size_bytes: int, function: Callable[[], None]) -> None:
    """Run a test in a child whose /dev/shm is a tmpfs of its own, of this size. Needs root."""
    child = Child(_with_small_shm, size_bytes, function)
    try:
        assert child.wait(3 * WAIT_S) == 0
    finally:
        child.close()


def _with_small_shm(_pipe: Pipe, size_bytes: int, function: Callable[[], None]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, ms_rec, ms_private = 0x20000, 0x4000, 1 << 18
    assert libc.unshare(clone_newns) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, ms_rec | ms_private, None) == 0, os.strerror(ctypes.get_errno())
    options = f"size={size_bytes},mode=1777".encode()
    assert libc.mount(b"shm", b"/dev/shm", b"tmpfs", 0, options) == 0, os.strerror(ctypes.get_errno())
    function()


# ---- a namespace


def run_python(code: str, *arguments: str) -> str:
    """Run a program of its own, which may import this module and says nothing on stderr; its stdout."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout


class Namespace:
    """A namespace of its own: its coordinator, caches and children, and nothing of it left at the end."""

    def __init__(
        self, *, uid: int | None = None, ram_file_bytes: int | str = "16M", max_rows: int = 1024
    ) -> None:
        self.name = f"core-{os.getpid()}-{next(_numbers)}"
        self.names = Names(self.name, uid)
        self._uid = uid
        self._settings = {"--ram-file-bytes": ram_file_bytes, "--max-rows": max_rows}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self.coordinator: subprocess.Popen[bytes] | Child | None = None
        self._caches: list[Cache] = []
        self._children: list[Child] = []

    def start(
        self,
        *flags: str,
        patch: Callable[[], None] | None = None,
        command: bool = False,
        ready: bool = True,
        within_s: float = WAIT_S,
    ) -> str:
        """Start a coordinator and return its ready line, which is there within so long.

        A fork of this process, which is there in no time and may be patched to die or fail at some step,
        or with `command` the program as people start it. Without `ready` nothing is waited for.
        """
        settings = [f"{name}={value}" for name, value in self._settings.items()]
        arguments = [f"--namespace={self.name}", *settings, *flags]
        if isinstance(self.coordinator, Child):
            self.coordinator.close()
        reader, writer = os.pipe()
        if command:
            self.coordinator = subprocess.Popen(
                [sys.executable, "-m", "shmcache.server", *arguments],
                cwd=ROOT,
                stdout=writer,
                stderr=self._log,
            )
        else:
            # A child of another uid may not be able to start python for a tracker of its own.
            resource_tracker.ensure_running()
            self.coordinator = Child(
                _serve, patch, arguments, uid=self._uid, streams=(writer, self._log.fileno())
            )
        os.close(writer)
        try:
            return self._first_line(reader, within_s) if ready else ""
        finally:
            os.close(reader)

    def _first_line(self, reader: int, within_s: float) -> str:
        line = b""
        while not line.endswith(b"\n"):
            assert select.select([reader], [], [], within_s)[0], f"not ready: {self.log()}"
            chunk = os.read(reader, 4096)
            assert chunk, f"ended before it was ready: {self.log()}"
            line += chunk
        return line.decode()

    def log(self) -> str:
        """Everything that coordinators of this namespace have written to stderr."""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode()

    @property
    def pid(self) -> int:
        """The coordinator's."""
        assert self.coordinator is not None
        return self.coordinator.pid

    def kill(self) -> None:
        """kill -9 of the coordinator."""
        if self.coordinator is not None:
            self.coordinator.kill()
            self.coordinator.wait()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the coordinator by a signal; its exit code."""
        assert self.coordinator is not None
        self.coordinator.send_signal(number)
        return self.coordinator.wait(WAIT_S)

    def restart(self, *flags: str) -> str:
        """kill -9, and the next one."""
        self.kill()
        return self.start(*flags)

    def reboot(self) -> None:
        """kill -9, and nothing of the namespace is left in memory."""
        self.kill()
        for path in reversed(self.objects()):
            with contextlib.suppress(FileNotFoundError):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        mq.unlink(self.names)

    def cache(self, **options: Any) -> Cache:
        """A cache of this process, closed at the end."""
        cache = attach(self.name, **options)
        self._caches.append(cache)
        return cache

    def child(self, function: Callable[..., object], *arguments: object) -> Child:
        """A process that runs `function(pipe, *arguments)` under the namespace's uid."""
        child = Child(function, *arguments, uid=self._uid)
        self._children.append(child)
        return child

    def objects(self) -> list[Path]:
        """Everything of the namespace in /dev/shm."""
        flat = self.names.directory.name
        tops = [path for path in SHM_ROOT.iterdir() if path.name == flat or path.name.startswith(f"{flat}.")]
        return sorted([*tops, *(path for top in tops for path in top.rglob("*"))])

    def used_bytes(self) -> int:
        """What the namespace takes of /dev/shm, as the kernel counts it."""
        return sum(path.lstat().st_blocks * 512 for path in self.objects())

    def stat(self, name: str) -> int:
        """A statistics word of the coordinator, as it stood at its last tick."""
        reader = self._caches[0].connection.reader() if self._caches else self.cache().connection.reader()
        assert reader is not None
        return reader.stats()[name]

    def close(self) -> None:
        """Processes first, then everything that they have left."""
        for child in self._children:
            child.close()
        for cache in self._caches:
            cache.close()
        self.reboot()
        if isinstance(self.coordinator, Child):
            self.coordinator.close()
        db.remove(db.default_path(self.name))
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(_pipe: Pipe, patch: Callable[[], None] | None, arguments: list[str]) -> int:
    if patch is not None:
        patch()
    return server.main(arguments)


def die_at(owner: Any, name: str, *, nth: int = 1, after: bool = False) -> None:
    """kill -9 of this process at the nth call of `owner.name`, before it or after it. For a fork's patch."""
    real = getattr(owner, name)
    calls = iter(range(1, 1 << 30))

    def dying(*arguments: Any, **options: Any) -> Any:
        is_it = next(calls) == nth
        if is_it and not after:
            die()
        result = real(*arguments, **options)
        if is_it:
            die()
        return result

    setattr(owner, name, dying)
