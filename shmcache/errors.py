"""The error tree: whose fault, what to do, the numbers.

    ShmcacheError
    ├── ConfigError            the operator's settings contradict each other or the machine
    ├── AlreadyRunning         a coordinator of this namespace lives; the second one leaves
    ├── OutOfSpace             /dev/shm or a tier is full: a skipped save, or a refused start
    ├── QueueLimit             the kernel's message queue limits are spent
    ├── ForeignObject          something of ours is not ours: wrong owner, mode or kind
    ├── LayoutMismatch         the other side was built with another memory layout
    ├── NoCoordinator          nothing answers for this namespace: serve uncached
    ├── CorruptSlab            bytes from a file or a slab are not a valid KVC v2 image
    ├── CorruptDecision        a stored value does not decode: counted, expired, decided anew
    ├── RestoreRefused         llama.cpp did not take a state, or took less than all of it
    ├── UsedAfterFork          a model handle was used in a forked child
    ├── StaleGenerator         a generator went on after another request took its context
    ├── WorkerDied             a pool's worker process ended with a request in hand
    ├── PoolStopped            a worker pool was closed, or its workers cannot boot
    └── IllegalTransition      our own fault: a state machine got an event it cannot have

A worker catches ShmcacheError at the edge of each request and serves uncached; only UsedAfterFork,
StaleGenerator and ConfigError ever reach the caller, because going on would be wrong. WorkerDied and
PoolStopped are raised in the process that asks a pool.

Leaves out: what Python says itself (OSError of an unknown kind stays an OSError).
"""

from __future__ import annotations

MIB = 1 << 20


def mib(size_bytes: int) -> str:
    """Bytes as people read them: `48 MiB`, or `12.5 MiB` where a fraction matters."""
    whole, rest = divmod(size_bytes, MIB)
    return f"{whole} MiB" if not rest or whole >= 100 else f"{size_bytes / MIB:.3g} MiB"


class ShmcacheError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(ShmcacheError):
    """A setting is wrong; the message holds both values and the remedy."""


class AlreadyRunning(ShmcacheError):
    """A coordinator of this namespace and user holds the lock; `pid` is for people to read."""

    def __init__(self, namespace: str, pid: int) -> None:
        self.namespace, self.pid = namespace, pid
        super().__init__(
            f"a coordinator of namespace {namespace!r} is running already (pid {pid}): "
            f"use it, stop it first, or take another --namespace"
        )


class OutOfSpace(ShmcacheError):
    """A tier or its file system cannot take `need_bytes`; `free_bytes` are left."""

    def __init__(self, tier: str, need_bytes: int, free_bytes: int, remedy: str = "") -> None:
        self.tier, self.need_bytes, self.free_bytes = tier, need_bytes, free_bytes
        text = f"{tier} has {mib(free_bytes)} free and {mib(need_bytes)} are needed"
        super().__init__(f"{text}: {remedy}" if remedy else text)


class QueueLimit(ShmcacheError):
    """mq_open was refused because RLIMIT_MSGQUEUE of this user is spent (it reads as EMFILE)."""

    def __init__(self, need_bytes: int, limit_bytes: int) -> None:
        self.need_bytes, self.limit_bytes = need_bytes, limit_bytes
        super().__init__(
            f"the POSIX message queue needs {need_bytes} bytes and RLIMIT_MSGQUEUE "
            f"({limit_bytes} bytes for all queues of this user, containers included) is spent: "
            f"raise it (ulimit -q) or remove unused queues (/dev/mqueue)"
        )


class ForeignObject(ShmcacheError):
    """An object at one of our names has another owner, more permissions, or is of another kind.

    owner is -1 where the system does not say whose it is.
    """

    def __init__(self, name: str, owner: int, mode: int) -> None:
        self.name, self.owner, self.mode = name, owner, mode
        whose = f"uid {owner} with mode {mode:o}" if owner >= 0 else "another user"
        super().__init__(
            f"{name} belongs to {whose} and is not used: remove it, or start with another --namespace"
        )


class LayoutMismatch(ShmcacheError):
    """The shared memory was laid out by a differently built process; both layout hashes are given."""

    def __init__(self, ours: int, theirs: int) -> None:
        self.ours, self.theirs = ours, theirs
        super().__init__(
            f"shared memory has layout {theirs:016x} and this process reads {ours:016x}: "
            f"run one version of shmcache in coordinator and workers"
        )


class NoCoordinator(ShmcacheError):
    """Nothing answers for this namespace; the caller serves uncached and looks again later."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        super().__init__(
            f"no coordinator runs for namespace {namespace!r}: "
            f"start shmcache-coordinator --namespace {namespace}"
        )


class CorruptSlab(ShmcacheError):
    """Bytes are not a valid KVC v2 image. The one error that foreign bytes can cause."""


class CorruptDecision(ShmcacheError):
    """A stored value is not a decision; it is expired, so that a new one can take its place."""


class RestoreRefused(ShmcacheError):
    """llama.cpp refused a state or took another length than it has; the memory was cleared."""


class UsedAfterFork(ShmcacheError):
    """A handle was used in another process than the one that made it."""

    def __init__(self, what: str, made_in: int, used_in: int) -> None:
        self.made_in, self.used_in = made_in, used_in
        super().__init__(
            f"{what} was made in process {made_in} and used in process {used_in}: "
            f"load the model after the fork (gunicorn: in post_fork, without --preload)"
        )


class StaleGenerator(ShmcacheError):
    """A token generator went on after another request had taken over its context."""


class WorkerDied(ShmcacheError):
    """The worker process that had the request ended; `exit_code` is negative for a signal."""

    def __init__(self, worker: int, exit_code: int, tries: int) -> None:
        self.worker, self.exit_code, self.tries = worker, exit_code, tries
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        super().__init__(f"worker {worker} ended with {how} while it had this request (try {tries})")


class PoolStopped(ShmcacheError):
    """The pool takes no requests: it was closed, or its workers do not boot; the message says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the worker pool has stopped: {reason}")


class IllegalTransition(ShmcacheError):
    """A state machine got an event that its table does not have; nothing was changed."""

    def __init__(self, state: str, event: str) -> None:
        self.state, self.event = state, event
        super().__init__(f"event {event!r} is illegal in state {state!r}")
