"""Slabs in a worker: one in the making, the ones that it keeps mapped, and one read from disk.

    prepare   unnamed file, allocated, mapped, populated        helper thread, beside the prefill
    payload   the state is copied out of the context            the request's thread: the only wait
    finish    checksum, metadata, trim                          helper thread
    link      the name in the tier's `in/` = complete           helper thread

Owner: the worker that reserved it, until the link; then the coordinator.
Readers: nobody before the link; after it a slab never changes (kvc: but for two counters).
Invariants
    I1  A slab has no name until it is complete: what dies before leaves nothing.
    I2  A mapping was summed when it was made; kept, it is immutable and is not summed again.
    I3  A kept mapping is let go when its row has left, when its bytes are wanted for another, and
        never under a reader: its pages live as long as the last view, and are reported until then.
    I4  What is read from disk is summed at every read; its buffer is used again only when nobody has
        a view of it.
Leans on
    posix_fallocate says ENOSPC where a first touch would be a SIGBUS.
    MADV_POPULATE_WRITE (Linux 5.14) faults all pages in one call, and ctypes releases the GIL around
    it; without it the first copy faults them, which is slower and just as right.
    A mmap refuses to be resized, be it to the size that it has, while anybody has a view of it.
Leaves out: what is saved and when (workers), bytes and names of messages (client).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from crc32c import crc32c

from shmcache import kvc, shm
from shmcache.errors import CorruptSlab
from shmcache.shm import Mapping

_MADV_POPULATE_WRITE = 23
_HUGE_BYTES = 1 << 21
_READ_BYTES = 1 << 18  # summed while it still lies in the processor's cache, and the disk reads on meanwhile
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class UnnamedSlab:
    """A slab in the making: `charged_bytes` is what it may grow to and what its worker states."""

    def __init__(self, directory_fd: int, payload_offset: int, size_bytes: int) -> None:
        """Allocate and populate. Raises OSError (ENOSPC) with nothing left behind."""
        self._fd = shm.make_unnamed(directory_fd)
        self._mapping: Mapping | None = None
        self._payload_offset = payload_offset
        self.charged_bytes = size_bytes
        try:
            shm.allocate(self._fd, size_bytes)
            self._mapping = Mapping(self._fd, size_bytes, writable=True)
            _populate(self._mapping)
        except BaseException:
            self.close()
            raise

    def payload(self, payload_bytes: int) -> memoryview:
        """Where the state goes: a writable view of B, valid until finish or close."""
        assert self._mapping is not None
        return self._mapping.bytes[self._payload_offset : self._payload_offset + payload_bytes]

    def finish(
        self, meta: kvc.Meta, pieces: Sequence[kvc.Piece], token_ids: memoryview, payload_bytes: int
    ) -> None:
        """Sum the payload, write everything before it, trim to the real size."""
        assert self._mapping is not None
        with self.payload(payload_bytes) as payload:
            payload_crc32c = crc32c(payload)
        head = kvc.encode_head(
            meta, pieces, token_ids, payload_bytes, payload_crc32c, payload_offset=self._payload_offset
        )
        self._mapping.bytes[: len(head)] = head
        self._mapping.close()
        self._mapping = None
        os.ftruncate(self._fd, self._payload_offset + payload_bytes)

    def link(self, directory_fd: int, name: str) -> None:
        """Give it its name: from here on it belongs to the coordinator."""
        shm.give_name(self._fd, directory_fd, name)

    def close(self) -> None:
        """End our view; without a name the kernel frees the bytes."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MappedSlab:
    """A published slab, mapped and verified. Views of it stay valid for as long as they exist.

    used says when it was used last, by a number that grows with each use.
    """

    __slots__ = ("_mapping", "image", "size_bytes", "used")

    def __init__(self, mapping: Mapping) -> None:
        """Parse and sum. Raises CorruptSlab; the mapping is closed then."""
        self._mapping = mapping
        self.used = 0
        self.size_bytes = mapping.bytes.nbytes
        try:
            self.image = kvc.parse(mapping.bytes)
            kvc.verify_payload(self.image)
        except BaseException:
            mapping.close()
            raise

    def close(self) -> weakref.ref[mmap.mmap] | None:
        """Let go; pages live on under whoever still has a view (shm.Mapping.close)."""
        return self._mapping.close()


class ReadBuffers:
    """Buffers for slabs from disk: to fault in a fresh one costs more than its read."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, size_bytes: int) -> mmap.mmap:
        """A buffer of at least so many bytes; its content is whatever it was. Raises OSError."""
        buffer = self._free.pop() if self._free else None
        return buffer if buffer is not None and len(buffer) >= size_bytes else _huge(size_bytes)

    def give_back(self, buffer: mmap.mmap) -> None:
        """Use it again, unless somebody still looks at it (I4)."""
        try:
            buffer.resize(len(buffer))
        except BufferError:
            return
        if not self._free:
            self._free.append(buffer)


class ReadSlab:
    """A slab read from disk into a buffer, and verified. Its views end at close()."""

    def __init__(self, fd: int, buffers: ReadBuffers) -> None:
        """Read, parse and sum. Raises CorruptSlab, OSError."""
        self.size_bytes = os.fstat(fd).st_size
        self.used = 0
        self._buffers = buffers
        # A hint of the whole file (WILLNEED) makes single pages of it before the first byte comes, and was
        # slower than the kernel's own read-ahead, which makes large ones while pieces are copied and summed.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        first = os.pread(fd, _READ_BYTES, 0)
        # A file that lies about its size ends here, before a buffer of that size is taken.
        payload_offset = kvc.parse_head(first, self.size_bytes).payload_offset
        self._buffer = buffers.take(self.size_bytes)
        with memoryview(self._buffer) as whole:
            view = whole[: self.size_bytes]
        view[: len(first)] = first
        payload_crc32c = _read_on(fd, view, len(first), payload_offset)
        self.image = kvc.parse(view)
        kvc.verify_payload(self.image, payload_crc32c)
        view.release()

    def close(self) -> None:
        """End the views and let the buffer be used again."""
        self.image.payload.release()
        self.image.token_ids.release()
        self._buffers.give_back(self._buffer)


H = TypeVar("H")


class KeptSlabs(Generic[H]):
    """The mappings that a worker keeps, by key, each with whatever its owner hands out for it.

    get() may be called by any thread at any time; for the others the caller holds a lock.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._handles: dict[bytes, H] = {}
        self._slabs: dict[bytes, MappedSlab] = {}
        self._orphans: list[tuple[weakref.ref[mmap.mmap], int]] = []
        self.kept_bytes = 0
        self.get = self._handles.get
        """get(key): the handle of a mapping that is kept, or None. The dict's own: every hit asks."""

    @property
    def orphaned_bytes(self) -> int:
        """Bytes let go that somebody still looks at."""
        self._orphans = [(orphan, size) for orphan, size in self._orphans if orphan() is not None]
        return sum(size for _orphan, size in self._orphans)

    def put(self, key: bytes, slab: MappedSlab, handle: H) -> None:
        """Keep a mapping, and let go of those used longest ago where the limit asks for it.

        A slab larger than the limit is used once and not kept.
        """
        self.let_go(key)
        if slab.size_bytes > self._limit_bytes:
            return
        while self.kept_bytes + slab.size_bytes > self._limit_bytes:
            self.let_go(min(self._slabs, key=lambda kept: self._slabs[kept].used))
        self._slabs[key] = slab
        self._handles[key] = handle
        self.kept_bytes += slab.size_bytes

    def let_go(self, key: bytes) -> None:
        """Close one mapping, if it is kept."""
        self._handles.pop(key, None)
        slab = self._slabs.pop(key, None)
        if slab is not None:
            self.kept_bytes -= slab.size_bytes
            if (orphan := slab.close()) is not None:
                self._orphans.append((orphan, slab.size_bytes))

    def let_go_where(self, has_left: Callable[[H], bool]) -> None:
        """Close all mappings whose row has left the index."""
        for key, handle in list(self._handles.items()):
            if has_left(handle):
                self.let_go(key)

    def clear(self) -> None:
        """Close all."""
        for key in list(self._slabs):
            self.let_go(key)


def _huge(size_bytes: int) -> mmap.mmap:
    """Memory of its own, in huge pages where there are any: the copies into it and out of it take a third."""
    buffer = mmap.mmap(-1, max(1, -(-size_bytes // _HUGE_BYTES)) * _HUGE_BYTES, flags=mmap.MAP_PRIVATE)
    with contextlib.suppress(OSError):  # a kernel without them
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def _populate(mapping: Mapping) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping.bytes))
    _libc.madvise(address, mapping.bytes.nbytes, _MADV_POPULATE_WRITE)


def _read_on(fd: int, view: memoryview, done_bytes: int, payload_offset: int) -> int:
    """Fill the view from `done_bytes` on; the CRC32C of all that lies behind `payload_offset`."""
    payload_crc32c = crc32c(view[payload_offset:done_bytes])
    while done_bytes < view.nbytes:
        read_bytes = os.preadv(fd, [view[done_bytes : done_bytes + _READ_BYTES]], done_bytes)
        if read_bytes == 0:
            raise CorruptSlab(f"the file ends at {done_bytes} of {view.nbytes} bytes")
        begin = max(payload_offset, done_bytes)
        done_bytes += read_bytes
        payload_crc32c = crc32c(view[begin:done_bytes], payload_crc32c)
    return payload_crc32c
