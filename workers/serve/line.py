"""Which worker takes this request? The first that is free, whoever's desk it came in at.

    desk ── socketpair ──► keeps one end          the request, and later its answer
               │
               └ other end, as a file descriptor ──► the line ──► engine: the first that is free

The line is one socket that all workers inherit. What stands in it is a descriptor (SCM_RIGHTS), so whoever
takes it is connected to the desk that asked, and there is nothing to look up, to name or to clean.

Owner: the master, which makes it before the first fork. Readers: every engine.
Invariants
    I1  One request is taken by one engine; they are taken in the order in which they came.
    I2  Whoever of the two ends dies, at whatever moment, the other reads the end of the file: also while the
        descriptor stands in the line and after it was taken by an engine that then dies.
Leans on: the kernel gives each message of a SOCK_SEQPACKET socket to one reader, and closes the descriptors
of messages that nobody reads any more.
Leaves out: how long the line may get (desk), what is said over the connection (wire).
"""

from __future__ import annotations

import socket


class Line:
    """Requests that wait for an engine."""

    def __init__(self) -> None:
        self._out, self._in = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._out.setblocking(False)
        self._in.setblocking(False)

    def put(self, end: socket.socket) -> bool:
        """Let an engine have this end of a connection; False where the kernel takes no more."""
        try:
            socket.send_fds(self._in, [b"!"], [end.fileno()])
        except OSError:  # EAGAIN: its buffer is full; ETOOMANYREFS: so many descriptors are on their way
            return False
        return True

    def take(self) -> socket.socket | None:
        """The next connection, None where nobody waits. Never waits itself."""
        try:
            _, descriptors, _, _ = socket.recv_fds(self._out, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        return socket.socket(fileno=descriptors[0]) if descriptors else None

    def fileno(self) -> int:
        """Readable while somebody waits."""
        return self._out.fileno()
