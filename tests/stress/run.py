"""The long run: hits that are verified in every bit, retries on hot keys, kills at every step.

    hits    a coordinator, a writer and two readers at full speed; the budget holds two thirds of all rows
    hot     16 keys in two full buckets of an index, until enough retries were counted
    kills   a coordinator, a writer and a reader; one of them is killed, at random or at a line that takes a
            step, and started again; then all are at rest and check() must have nothing to say

Each phase ends when it has what it wants. The last line of all is JSON with what was found; anything but
zeros where zeros belong is a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import actors
import contents
import hot
import kill_points
import posix_ipc
import psutil
from board import GO, PAUSE, STOP, Board, Column, Word
from kill_points import KillPoint
from support import Child, Namespace, eventually

from shmcache import server
from shmcache.check import check
from shmcache.tools import clean

_PR_SET_CHILD_SUBREAPER = 36
_REACHED_WITHIN_S = 2.0
_AT_REST_WITHIN_S = 10.0
_TRIES = 5
ROLES = ("coordinator", "writer", "reader")


class Scale(NamedTuple):
    """How much of everything; a phase that has not got it in its time fails."""

    hits: int = 7_000_000
    hot_hits: int = 3_000_000
    retries: int = 10_000
    kills: int = 1_000
    families: int = 256
    phase_s: float = 3_600.0
    seed: int = 1


class Report(NamedTuple):
    """The last line."""

    verified_hits: int
    retried: int
    kills: int
    wrong: int
    findings: int
    leaked_bytes: int
    leaked_queues: int
    leaked_processes: int

    @property
    def is_good(self) -> bool:
        """Nothing wrong, nothing found, nothing left."""
        return not any(self[3:])

    def is_enough(self, scale: Scale) -> bool:
        """As much as was asked for."""
        asked = (scale.hits + scale.hot_hits, scale.retries, scale.kills)
        return all(there >= wanted for there, wanted in zip(self[:3], asked, strict=True))


class Run:
    """One run; everything that it starts and makes is gone when it ends, however it ends."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.board = Board()
        self.kills = 0
        self.reached: Counter[str] = Counter()
        self.named: Counter[str] = Counter()
        self.missed: list[str] = []
        self.findings: list[str] = []
        self._leaked_bytes = 0
        self._before = {process.pid for process in processes()}
        self._spaces: list[Namespace] = []
        self._children: set[Child] = set()

    def all(self) -> Report:
        """All phases, one after the other."""
        self.hits()
        self.hot()
        self.kill_everywhere()
        return self.report()

    def report(self) -> Report:
        """What was found so far, and what is left of what has ended."""
        return Report(
            verified_hits=self.board.total(Word.HITS),
            retried=self.board.total(Word.RETRIES),
            kills=self.kills,
            wrong=self.board.total(Word.WRONG),
            findings=len(self.findings),
            leaked_bytes=self._leaked_bytes + sum(used_bytes(space) for space in self._spaces),
            leaked_queues=sum(has_queue(space) for space in self._spaces),
            leaked_processes=sum(process.pid not in self._before for process in processes()),
        )

    # ---- hits

    def hits(self) -> None:
        """Slabs of 4 KiB to 1 MiB while rows come and go."""
        wanted = contents.families(self.scale.families)
        total_bytes = sum(entry.payload_bytes for family in wanted for entry in family.entries)
        self._say(f"hits: {4 * len(wanted)} rows of {total_bytes >> 20} MiB in all")
        with self._space(ram_file_bytes=total_bytes * 2 // 3, max_rows=1024) as space:
            space.start(command=True)
            self.board.switch(GO)
            readers = [(wanted, total_bytes // 3), (wanted, 1 << 30)]
            children = [self.child(actors.write, self.board.column(), space.name, wanted)]
            for options in readers:
                children.append(self.child(actors.read, self.board.column(), space.name, *options))
            goal = self.board.total(Word.HITS) + self.scale.hits
            self._until(lambda: self.board.total(Word.HITS) >= goal, children)
            self._stop(children)
            self._look(space, "after the hits")

    # ---- hot keys

    def hot(self) -> None:
        """Retries: the index alone, 16 keys in 16 places."""
        world = hot.World()
        hits_goal = self.board.total(Word.HITS) + self.scale.hot_hits
        retries_goal = self.board.total(Word.RETRIES) + self.scale.retries
        with self._space():
            self.board.switch(GO)
            crowd = (hot.write, hot.read, hot.read)
            children = [self.child(actor, self.board.column(), world) for actor in crowd]

            def is_enough() -> bool:
                return (
                    self.board.total(Word.HITS) >= hits_goal
                    and self.board.total(Word.RETRIES) >= retries_goal
                )

            self._until(is_enough, children)
            self._stop(children)

    # ---- kills

    def kill_everywhere(self) -> None:
        """kill -9 of each role, at each of its points in turn and at random."""
        chosen = random.Random(self.scale.seed)
        points = [point for role in ROLES for point in kill_points.points(role)]
        chosen.shuffle(points)
        # What has a name comes first and more often, so that a short run has it too.
        named = [point for point in points if point.step]
        points = named * 3 + points
        wanted = contents.families(12, largest_bytes=64 << 10, seed=2)
        total_bytes = sum(entry.payload_bytes for family in wanted for entry in family.entries)
        with (
            tempfile.TemporaryDirectory() as disk,
            self._space(ram_file_bytes=total_bytes // 3, max_rows=24) as space,
        ):
            stage = Stage(self, space, wanted, total_bytes // 6, Path(disk))
            stage.start()
            turn = 0
            while self.kills < self.scale.kills:
                point = points[turn % len(points)]
                nth = 1 if turn < len(named) or point.comes_once else chosen.randrange(1, 6)
                turn += 1
                stage.kill(point.role, point, nth, 0)
                if turn % 4 == 0:
                    stage.kill(chosen.choice(ROLES), None, 0, chosen.random() * 0.1)
                if turn % 50 == 0:
                    self._say(
                        f"kills: {self.kills}, {len(self.reached)} lines, {len(self.findings)} findings"
                    )
            if turn > len(named):
                self._kill_where_missed(stage, named)
            stage.stop()
            self._look(space, "after the kills")

    def _kill_where_missed(self, stage: Stage, named: list[KillPoint]) -> None:
        """A step may not have come within its time, on a machine that has much else to do."""
        for point in named * _TRIES:
            if point.step not in self.named:
                stage.kill(point.role, point, 1, 0)
        self.missed = sorted({point.step for point in named} - self.named.keys())

    def note(self, space: Namespace, when: str) -> bool:
        """check() at rest: what it still says after a while is a finding. Whether there was none."""
        findings: list[Any] = []
        until_s = time.monotonic() + _AT_REST_WITHIN_S
        while findings := check(space.name):
            if time.monotonic() > until_s:
                self.findings += [f"{when}: {finding}" for finding in findings]
                self._say(f"FINDINGS {when}: {findings}\n{space.log()[-2000:]}")
                return False
            time.sleep(0.01)
        return True

    # ---- what phases share

    @contextlib.contextmanager
    def _space(self, **options: Any) -> Iterator[Namespace]:
        space = Namespace(**options)
        self._spaces.append(space)
        try:
            yield space
        finally:
            self.board.switch(STOP)
            for child in list(self._children):
                self.end(child)
            space.close()

    def child(self, function: Callable[..., object], *arguments: object) -> Child:
        """An actor in a process of its own."""
        child = Child(function, *arguments)
        self._children.add(child)
        return child

    def end(self, child: Child) -> None:
        """kill -9, unless it has ended, and nothing of it is left."""
        self._children.remove(child)
        child.close()

    def _until(self, is_enough: Callable[[], bool], children: Sequence[Child]) -> None:
        began_s = said_s = time.monotonic()
        while not is_enough():
            time.sleep(0.05)
            now_s = time.monotonic()
            assert all(child.poll() is None for child in children), "an actor has ended by itself"
            assert now_s - began_s < self.scale.phase_s, f"not done in {self.scale.phase_s} s"
            if now_s - said_s > 15:
                said_s = now_s
                self._say(self._figures())
        self._say(f"{self._figures()} in {time.monotonic() - began_s:.0f} s")

    def _figures(self) -> str:
        counted = {word.name.lower(): self.board.total(word) for word in Word if word is not Word.PAUSED}
        return ", ".join(f"{name} {count}" for name, count in counted.items() if count)

    def _stop(self, children: Sequence[Child]) -> None:
        self.board.switch(STOP)
        for child in children:
            if child.wait() != 0:
                self.findings.append(f"an actor ended with {child.poll()}")
            self.end(child)

    def _look(self, space: Namespace, when: str) -> None:
        """At the end of a namespace: check, a clean stop, and what is there that no row needs."""
        if space.coordinator is not None:
            self.note(space, when)
            if (code := space.stop()) != 0:
                self.findings.append(f"{when}: the coordinator ended with {code}: {space.log()[-2000:]}")
        stays = ("ram_file/*.kvc", space.names.control.name, "disk/where")
        paths = [path for pattern in stays for path in space.names.directory.glob(pattern)]
        self._leaked_bytes += used_bytes(space) - sum(path.lstat().st_blocks * 512 for path in paths)
        clean.remove(space.name)

    def _say(self, what: str) -> None:
        print(what, file=sys.stderr, flush=True)


class Stage:
    """A coordinator, a writer and a reader, and one of them killed after the other."""

    def __init__(
        self, run: Run, space: Namespace, wanted: Sequence[contents.Family], ram_bytes: int, disk: Path
    ) -> None:
        self._run = run
        self._disk = disk
        self._space = space
        self._wanted = wanted
        self._ram_bytes = ram_bytes
        self._actors: dict[str, tuple[Child, Column]] = {}

    def start(self) -> None:
        """Everybody, unarmed."""
        self._run.board.switch(PAUSE)
        self._start("coordinator", None)
        for role in ("writer", "reader"):
            self._start(role, None)

    def stop(self) -> None:
        """Everybody but the coordinator."""
        self._run.board.switch(STOP)
        for child, _ in self._actors.values():
            child.wait()

    def kill(self, role: str, point: KillPoint | None, nth: int, after_s: float) -> None:
        """Kill one, at a point if it comes there in time, and start it again; all agrees then."""
        if point is None or self._is_armed(role, partial(kill_points.arm, point, nth)):
            self._run.board.switch(GO)
            point = self._wait_for_death(role, point, after_s)
            self._run.board.switch(PAUSE)
        self._count(point)
        self._rest(role, f"after {point or role}")

    def _is_armed(self, role: str, arm: Callable[[], None]) -> bool:
        """Who is to die at a line has to be told before it begins, so another takes its place.

        False where a coordinator was killed before it served.
        """
        if role != "coordinator":
            self._start(role, arm)
            return True
        try:
            self._start(role, arm)
        except AssertionError:
            process = self._process(role)
            assert process.wait() == -signal.SIGKILL, self._space.log()
            return False
        return True

    def _wait_for_death(self, role: str, point: KillPoint | None, after_s: float) -> KillPoint | None:
        """The point at which it died; None if it was killed from here."""
        process = self._process(role)
        until_s = time.monotonic() + (after_s if point is None else _REACHED_WITHIN_S)
        while process.poll() is None and time.monotonic() < until_s:
            time.sleep(0.001)
        is_late = process.poll() is None
        process.kill()
        assert process.wait() == -signal.SIGKILL, f"{role} ended with {process.poll()}: {self._space.log()}"
        return None if is_late else point

    def _count(self, point: KillPoint | None) -> None:
        self._run.kills += 1
        if point is not None:
            self._run.reached[str(point)] += 1
            self._run.named[point.step] += 1

    def _rest(self, role: str, when: str) -> None:
        """The dead one's place is taken, everybody pauses, and check() has nothing to say."""
        columns = [column for name, (_, column) in self._actors.items() if name != role]
        eventually(lambda: actors.columns_at_rest(self._run.board, columns))
        if role == "coordinator":
            self._start(role, None)
        self._run.note(self._space, when)
        if role != "coordinator":
            self._start(role, None)

    def _process(self, role: str) -> Any:
        return self._space.coordinator if role == "coordinator" else self._actors[role][0]

    def _start(self, role: str, arm: Callable[[], None] | None) -> None:
        if role == "coordinator":
            patch = partial(_hurry, arm)
            sizes = [f"--{name}-bytes={self._ram_bytes}" for name in ("ram", "disk", "staging")]
            self._space.start(*sizes, f"--disk-dir={self._disk}", "--decisions-rows=16", patch=patch)
            return
        function, options = {
            "writer": (actors.write, (self._wanted, ("ram", "ram_file", "disk"), arm)),
            "reader": (actors.read, (self._wanted, 1 << 20, arm)),
        }[role]
        if role in self._actors:
            self._run.end(self._process(role))
        column = self._run.board.column()
        self._actors[role] = (self._run.child(function, column, self._space.name, *options), column)


def _hurry(arm: Callable[[], None] | None) -> None:
    """In the coordinator, before it starts: ticks and sweeps that a test can wait for."""
    server.TICK_S, server.SWEEP_S = 0.03, 0.5
    if arm is not None:
        arm()


def used_bytes(space: Namespace) -> int:
    """What is there of a namespace."""
    return space.used_bytes()


def has_queue(space: Namespace) -> bool:
    """Whether its message queue has a name still."""
    try:
        posix_ipc.MessageQueue(space.names.queue).close()
    except posix_ipc.ExistentialError:
        return False
    return True


def processes() -> list[psutil.Process]:
    """Whoever of ours lives, orphans too; multiprocessing's own tracker ends with us."""
    resource_tracker.ensure_running()
    tracker = resource_tracker._resource_tracker._pid
    left = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid != tracker and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    return left


def main(scale: Scale) -> int:
    """Run all and print the report; 0 if there is nothing to complain of and enough was done."""
    # Whoever an actor leaves behind becomes our child, so that it can be seen.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run = Run(scale)
    report = run.all()
    steps = ", ".join(f"{step} {count}" for step, count in sorted(run.named.items()) if step)
    print(f"kills at named steps: {steps}")
    print(f"kills at {len(run.reached)} lines, in {sum(run.reached.values())} of {run.kills} cases")
    print(f"named steps without a kill: {', '.join(run.missed) or 'none'}")
    for finding in run.findings:
        print(finding)
    print(json.dumps(report._asdict()), flush=True)
    return 0 if report.is_good and report.is_enough(scale) and not run.missed else 1
