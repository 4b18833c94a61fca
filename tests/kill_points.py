"""kill -9 at every step: at each line of the functions that take the numbered steps.

A kill point is a line of the code. A process that is armed with one kills itself when it comes there for
the n-th time, before the line does anything. Where the line's comment numbers a step (`# P3 word`), or the
drawing of a start names one, the point has that name. Nothing of this is in the code that is killed: the
interpreter's trace function stops there.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from shmcache import client, connection, control, coordinator, index, mq, page, server, shm, slab
from shmcache.tiers import base, disk, memory

_MARK = re.compile(r"# ([PRW]\d|\d(?:, \d)*)\b[^#]*$")
_STARTS = {
    "OwnedControlPage.acquire(": "start: lock",
    "make_directory(names.pages)": "start: directories",
    "_budgets(": "start: budget",
    "IndexWriter.create(": "start: index",
    ".adopt(": "start: adopt",
    "_queue.receive()": "start: drain the queue",
    ".open_epoch(": "start: epoch",
    ".announced()": "start: announced",
    ".wake_all()": "start: wake",
    "_remove_older(epoch)": "start: remove older",
    "self._ready =": "start: ready",
}

_SAVES = {
    "Event.NAMED)": "save: named",
    "Event.CHECKED)": "save: checked",
    "lane.submit(Link(": "save: link asked for",
    "Event.LINKED)": "save: linked",
    "Event.INDEXED": "save: indexed",
    "os.link(handover.name": "save: first name only",
    "self.refuse(handover)\n": "save: two names",
}
"""Stages of a save at the coordinator, by what the line does that takes the next one."""

FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "coordinator": (
        index.IndexWriter.publish,
        index.IndexWriter._publish_bit,
        index.IndexWriter._remove,
        page.ClientPage.send,
        page.ClientPage.wake,
        control.OwnedControlPage.open_epoch,
        server.Server.__init__,
        server.Server._start,
        server.Server._remove_older,
        server.Clients.forget,
        coordinator.Coordinator._take,
        coordinator.Coordinator._linked,
        coordinator.Coordinator._enter,
        coordinator.Coordinator._forget_row,
        coordinator.Coordinator._release,
        coordinator.Coordinator._removed,
        coordinator.Coordinator._adopt_one,
        memory.MemoryTier.link,
        disk.DiskTier.link,
        disk.DiskTier._copy,
        disk.DiskTier._name,
        disk.DiskTier.remove,
        base.Tier.remove,
    ),
    "writer": (
        client.Slab._make,
        client.Slab._hand_over,
        client.Slab._give_back,
        client.Slab.let_go_of_bytes,
        slab.UnnamedSlab.__init__,
        slab.UnnamedSlab.finish,
        slab.UnnamedSlab.link,
        slab.UnnamedSlab.close,
        shm.give_name,
        mq.RequestQueue.send,
        connection.Connection._ask_once,
        connection.Connection.hold_unnamed,
        page.WorkerPage.wait,
        page.WorkerPage.reply,
    ),
    "reader": (
        index.IndexReader._make_get,
        index.IndexReader._search,
        index.IndexReader._tails,
        index.IndexReader._find_block,
        client.Cache._open,
        client.Cache._map,
        client.Hit.use,
    ),
}
"""Where each role takes its steps."""

# The lines are those of the code that runs, so they are read before anybody can change the files.
for _function in {function for functions in FUNCTIONS.values() for function in functions}:
    linecache.getlines(inspect.unwrap(_function).__code__.co_filename)


class KillPoint(NamedTuple):
    """A line, and the step that it takes where it has a name."""

    role: str
    code: CodeType
    line: int
    step: str

    @property
    def comes_once(self) -> bool:
        """Whether a process comes here only at its start."""
        return self.step.startswith("start")

    def __str__(self) -> str:
        step = f" ({self.step})" if self.step else ""
        return f"{self.role}: {self.code.co_qualname}:{self.line}{step}"


def points(role: str) -> list[KillPoint]:
    """Every line of a role's functions, in their order."""
    found = []
    for function in FUNCTIONS[role]:
        for code in _codes(inspect.unwrap(function).__code__):
            # The first line is the def itself: nothing has happened yet.
            lines = sorted({line for _, _, line in code.co_lines() if line and line > code.co_firstlineno})
            found += [KillPoint(role, code, line, _step(role, code, line)) for line in lines]
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and not constant.co_name.startswith("<"):
            yield from _codes(constant)


def _step(role: str, code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line)
    if match := _MARK.search(text.rstrip()):
        owner = {"coordinator": "send ", "reader": "reader "}.get(role, "")
        if code is disk.DiskTier.link.__code__:
            owner = "disk "
        return match[1] if match[1][0] in "PRW" else owner + match[1]
    if role == "coordinator" and "server" in code.co_filename:
        return next((step for part, step in _STARTS.items() if part in text), "")
    if code.co_name in ("_take", "_linked") or code is memory.MemoryTier.link.__code__:
        return next((step for part, step in _SAVES.items() if part in text), "")
    return ""


def arm(
    point: KillPoint, nth: int, blow: int = signal.SIGKILL, begins: Callable[[], bool] = lambda: True
) -> None:
    """This process gets the blow when it comes to this line for the nth time, on whatever thread.

    Times count from when `begins` says so: threads that run already cannot be told any more.
    """
    left = nth

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line" and frame.f_lineno == point.line and begins():
            left -= 1
            if left == 0:
                os.kill(os.getpid(), blow)
        return at_line

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        return at_line if event == "call" and frame.f_code is point.code else None

    threading.settrace(at_call)
    sys.settrace(at_call)
