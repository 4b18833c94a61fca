"""Start, die and start again: is what an epoch leads to always complete?

Coordinators one after the other, each killed at any step or not at all; two workers that look for the
epoch, map its index and look up a row that lies in the tier all the time. The control page's words go
through a store buffer; segments and the queue are the kernel's and are seen at once.

What must hold
    E1  The index that an epoch leads to is complete: a row that lies in the tier is found.
    E2  Who reads an epoch reads the layout that belongs to it (control I1).
    E3  A worker finds no segment twice running only where two epochs have begun meanwhile.
    E4  When a coordinator is ready, the segments of all others are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from explorer import replaced

STEPS = ("lock", "directories", "budget", "index", "adopt", "drain the queue", "epoch", "ready")
"""A start, as server.py draws it; epoch is three stores, then the wakes and the removal of what is older."""

EPOCH_STEPS = ("epoch 0", "layout", "epoch")
"""The stores of control.OwnedControlPage.open_epoch; the first two only after another build. The other words
are as harmless as `layout`."""

EPOCH, LAYOUT = range(2)
_BUFFERED = 2
_FAULTS = {
    "epoch before the index is built": (EPOCH_STEPS, "adopt"),
    "older removed before the epoch": (("remove older",), "epoch 0"),
    "epoch before the layout": (("epoch",), "layout"),
}
"""What comes too early, and before what."""

_OLD_LAYOUT, _OUR_LAYOUT = 1, 2


class Worker(NamedTuple):
    """phase: look → layout → open → (look again → open) → look up → look …, done"""

    phase: str = "look"
    mapped: int = 0
    epoch: int = 0
    tries: int = 0
    begun: int = 0  # epochs announced when this look began
    left: int = 2  # looks


class State(NamedTuple):
    """`at` counts the steps of the coordinator that runs; its epoch is `number`."""

    at: int
    lives: bool
    number: int
    segments: tuple[tuple[int, bool], ...]  # epoch, complete
    words: tuple[int, ...]
    buffer: tuple[tuple[int, int], ...]
    announced: int
    workers: tuple[Worker, ...]
    wrong: str = ""


class StartModel:
    """From an epoch 1 that another build made; `starts` coordinators follow, of our build."""

    def __init__(
        self, *, starts: int = 2, workers: int = 2, looks: int = 2, faults: Iterable[str] = ()
    ) -> None:
        self._starts = starts
        self._workers = workers
        self._looks = looks
        order: list[str] = []
        for step in STEPS:
            order += [*EPOCH_STEPS, "wake", "remove older"] if step == "epoch" else [step]
        for fault in faults:
            moved, before = _FAULTS[fault]
            order = [step for step in order if step not in moved]
            order[order.index(before) : order.index(before)] = moved
        self._order = tuple(order)

    # ---- explorer.Model

    def starts(self) -> Iterable[State]:
        workers = (Worker(left=self._looks),) * self._workers
        yield State(0, True, 2, ((1, True),), (1, _OLD_LAYOUT), (), 1, workers)

    def wrong(self, state: State) -> str:
        is_ready = state.lives and state.at == len(self._order)
        if is_ready and {epoch for epoch, _ in state.segments} != {state.number}:
            return "E4: a segment of another epoch is left"
        return state.wrong

    def stuck(self, state: State) -> str:
        return "" if all(worker.phase == "done" for worker in state.workers) else "a worker does not end"

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        yield from self._coordinator_steps(state)
        if state.buffer:
            (place, value), *left = state.buffer
            words = replaced(state.words, place, value)
            announced = state.announced + (place == EPOCH and value != 0)
            after = state._replace(words=words, buffer=tuple(left), announced=announced)
            yield f"{'epoch' if place == EPOCH else 'layout'} = {value} is seen", after
        for number, worker in enumerate(state.workers):
            for what, after, wrong in self._worker_steps(state, worker):
                workers = (*state.workers[:number], after, *state.workers[number + 1 :])
                yield f"worker {number + 1}: {what}", state._replace(workers=workers, wrong=wrong)

    # ---- the coordinators

    def _coordinator_steps(self, state: State) -> Iterator[tuple[str, State]]:
        if not state.lives:
            yield "the next coordinator", state._replace(at=0, lives=True, number=state.number + 1)
            return
        if state.number <= self._starts:
            # Its stores are done, though nobody may have seen them yet.
            yield "coordinator: is killed", state._replace(lives=False)
        if state.at == len(self._order):
            return
        step = self._order[state.at]
        after = state._replace(at=state.at + 1)
        stores = {
            "epoch 0": (EPOCH, 0),
            "layout": (LAYOUT, _OUR_LAYOUT),
            "epoch": (EPOCH, state.number),
        }
        what = f"coordinator {state.number}: {step}"
        if step in EPOCH_STEPS[:-1] and _own_view(state, LAYOUT) == _OUR_LAYOUT:
            yield f"{what} is not needed", after
        elif step in stores:
            if len(state.buffer) < _BUFFERED:
                yield what, after._replace(buffer=(*state.buffer, stores[step]))
        elif step == "index":
            yield what, after._replace(segments=(*state.segments, (state.number, False)))
        elif step == "adopt":
            segments = tuple((epoch, done or epoch == state.number) for epoch, done in state.segments)
            yield what, after._replace(segments=segments)
        elif step == "remove older":
            if not state.buffer:  # unlink(2) comes after all stores before it
                segments = tuple(entry for entry in state.segments if entry[0] == state.number)
                yield what, after._replace(segments=segments)
        else:
            yield what, after

    # ---- a worker

    def _worker_steps(self, state: State, worker: Worker) -> Iterator[tuple[str, Worker, str]]:
        epoch = state.words[EPOCH]
        match worker.phase:
            case "look":
                begun = worker._replace(begun=state.announced, tries=0)
                if worker.mapped and worker.mapped == epoch:
                    yield "looks up", self._next(worker), self._look_up(state, worker)
                elif epoch == 0:
                    yield "there is no epoch", self._next(worker._replace(mapped=0)), ""
                else:
                    yield f"epoch {epoch}", begun._replace(phase="layout", epoch=epoch, mapped=0), ""
            case "layout":
                yield self._layout(state, worker)
            case "open":
                yield self._open(state, worker)
            case "look again":
                if epoch == 0:
                    yield "there is no epoch", self._next(worker), ""
                else:
                    yield f"epoch {epoch}", worker._replace(phase="layout", epoch=epoch), ""
            case "look up":
                # The segment itself says which build made it (index.LayoutMismatch).
                wrong = self._look_up(state, worker) if worker.mapped > 1 else ""
                mapped = worker if worker.mapped > 1 else worker._replace(mapped=0)
                yield "looks up", self._next(mapped), wrong

    def _layout(self, state: State, worker: Worker) -> tuple[str, Worker, str]:
        if state.words[LAYOUT] == _OUR_LAYOUT:
            return "layout", worker._replace(phase="open"), ""
        wrong = "" if worker.epoch == 1 else "E2: an epoch of our build with another's layout"
        return "another layout", self._next(worker), wrong

    def _open(self, state: State, worker: Worker) -> tuple[str, Worker, str]:
        if any(number == worker.epoch for number, _ in state.segments):
            return "maps", worker._replace(phase="look up", mapped=worker.epoch), ""
        if worker.tries == 0:
            return "no segment", worker._replace(phase="look again", tries=1), ""
        is_fault = state.announced - worker.begun < 2
        wrong = "E3: no segment, twice, though one epoch has begun at most" if is_fault else ""
        return "no segment again", self._next(worker), wrong

    def _look_up(self, state: State, worker: Worker) -> str:
        """What is mapped stays though its name has gone; only the coordinator that made it adds to it."""
        is_complete = dict(state.segments).get(worker.mapped, True)
        return "" if is_complete else f"E1: epoch {worker.mapped} leads to an index that is not complete"

    def _next(self, worker: Worker) -> Worker:
        if worker.left == 1:
            return Worker("done", left=0)
        return Worker(mapped=worker.mapped, left=worker.left - 1)


def _own_view(state: State, place: int) -> int:
    """What the coordinator itself loads: its last store, seen by others or not."""
    stored = [value for at, value in state.buffer if at == place]
    return stored[-1] if stored else state.words[place]
