"""gunicorn for any WSGI or ASGI app that holds a SharedLlama.

    gunicorn -c python:shmcache.workers.gunicorn_hooks app:app

    master   pre_fork          the worker's share of the cores; its heartbeat file, to look at later
             child_exit        did it ever live? three in a row that did not end the server
    worker   post_fork         ends when the master ends, however that was
             post_worker_init  SIGTERM ends it in the way in which Python ends, also under uvicorn
             worker_exit       `shutdown` saves; models and caches are closed

Owner: gunicorn, which reads the names of this module as its settings; a configuration of one's own imports
them with `from shmcache.workers.gunicorn_hooks import *`.
Invariants
    I1  All workers together use the cores once (`worker_threads`).
    I2  Nothing respawns for ever: a worker that dies before its first heartbeat, in whatever way, has failed
        to boot; MAX_BOOT_FAILURES of them in a row end the server.
    I3  No worker outlives its master, whatever became of that.
    I4  A killed worker needs no hook: the kernel frees its lock, and the coordinator the rest in a second.
Leans on
    Each worker class of gunicorn touches its heartbeat file for the first time when it begins to serve. The
    time that it writes there is the monotonic clock's, long before that of the file's making.
    Only `child_exit` is sure to run after a SIGKILL. uvicorn raises SIGTERM once more when it has stopped.
    PR_SET_PDEATHSIG: the kernel signals a child whose parent has ended.
Leaves out: loading the model, which is the app's, in the worker: where its module is imported or when it
starts; with --preload never at import.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from shmcache.workers.pool import BOOT_PAUSE_S, MAX_BOOT_FAILURES, usable_cores

__all__ = [
    "child_exit",
    "graceful_timeout",
    "post_fork",
    "post_worker_init",
    "pre_fork",
    "timeout",
    "worker_exit",
    "worker_threads",
]

timeout = 600  # a sync worker has no heartbeat while it computes; gunicorn's 30 s end a long reply
graceful_timeout = 90  # an answer in hand, and then a `shutdown` save of up to 30 s

_BOOT_FAILED = 3  # gunicorn's own exit code for it
_THREADS = "SHMCACHE_WORKER_THREADS"
_PR_SET_PDEATHSIG = 1

_heartbeats: dict[Any, tuple[int, float]] = {}  # worker → its heartbeat file, and when that was made
_failures_in_a_row = 0


def worker_threads() -> int:
    """This worker's share of the cores, for n_threads and n_threads_batch; outside of gunicorn, all."""
    return int(os.environ.get(_THREADS) or usable_cores())


# In the master.


def pre_fork(server: Any, worker: Any) -> None:
    """Before each worker; behind one that did not boot, a pause in which its reason may pass."""
    if _failures_in_a_row:
        time.sleep(BOOT_PAUSE_S * 2 ** (_failures_in_a_row - 1))
    os.environ[_THREADS] = str(max(1, usable_cores() // max(1, server.num_workers)))
    heartbeat_fd = os.dup(worker.tmp.fileno())
    _heartbeats[worker] = heartbeat_fd, os.fstat(heartbeat_fd).st_mtime


def child_exit(server: Any, worker: Any) -> None:
    """After each worker, also a killed one. Raises gunicorn's HaltServer for the third that never lived."""
    global _failures_in_a_row  # noqa: PLW0603  one master, one count
    heartbeat_fd, made_at = _heartbeats.pop(worker)
    has_lived = os.fstat(heartbeat_fd).st_mtime < made_at
    os.close(heartbeat_fd)
    is_stopping = not server.LISTENERS and not server.cfg.reuse_port
    _failures_in_a_row = 0 if has_lived or is_stopping else _failures_in_a_row + 1
    if _failures_in_a_row >= MAX_BOOT_FAILURES:
        from gunicorn.errors import HaltServer  # noqa: PLC0415  the package is not needed without gunicorn

        raise HaltServer(f"{_failures_in_a_row} workers in a row ended before they served", _BOOT_FAILED)


# In the worker.


def post_fork(server: Any, worker: Any) -> None:
    """First thing in each worker."""
    for heartbeat_fd, _ in _heartbeats.values():
        os.close(heartbeat_fd)
    _heartbeats.clear()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != server.pid:  # it ended before the kernel knew
        sys.exit(0)


def post_worker_init(worker: Any) -> None:
    """The app is loaded; gunicorn's workers handle SIGTERM by now, uvicorn's leave it to the kernel."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def worker_exit(server: Any, worker: Any) -> None:
    """Last thing in each worker that is not killed: every SharedLlama of it makes its `shutdown` save."""
    module = sys.modules.get("shmcache.workers.shared_llama")
    if module is not None:
        for thing in gc.get_objects():
            if issubclass(type(thing), module.SharedLlama):
                thing.close()
