"""C03: truncate succeeds on a full tmpfs, and the first touch of a page dies by SIGBUS."""

from __future__ import annotations

import pytest
from support import Namespace, identity, in_small_shm, longest, needs_root, plan, prompt, save

from shmcache import shm
from shmcache.errors import OutOfSpace
from shmcache.shm import SHM_ROOT

WHO = identity()
A, B = prompt(1000), prompt(2000)


@needs_root
def test_case_c03_what_does_not_fit_is_skipped_and_counted_and_everybody_lives() -> None:
    def small() -> None:
        with Namespace(ram_file_bytes="2M", max_rows=16) as space:
            space.start("--decisions-rows=16", "--decisions-bytes=64K")
            cache = space.cache()
            assert save(cache, WHO, A, b"state")
            counters = cache.statistics().counters
            assert cache.reserve([plan(WHO, B, 3 << 20)], None, 0).slabs == [None], "beyond the budget"
            assert cache.statistics().counters["save_dropped_no_space"] == 1

            filler = SHM_ROOT / "filler"
            filler.write_bytes(bytes(shm.free_bytes() - 8192))
            (made,) = cache.reserve([plan(WHO, B, 100_000)], None, 0).slabs
            assert made is not None, "within the budget, but another program has taken the room"
            with pytest.raises(OutOfSpace, match=r"/dev/shm has 0\.00781 MiB free"):
                made.payload(100_000)
            assert cache.statistics().counters["save_dropped_no_space"] == 2
            assert longest(cache, WHO, B) == (len(A), b"state"), "the request is answered all the same"
            assert space.coordinator is not None
            assert space.coordinator.poll() is None
            filler.unlink()
            assert save(cache, WHO, B, bytes(100_000))
            assert counters["save_dropped_no_space"] == 0

    in_small_shm(4 << 20, small)
