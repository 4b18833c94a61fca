"""Is there an order of steps that breaks it? Every order is tried.

A model is a set of processes whose steps are as small as the hardware's: one load, one store, one system
call. From a state each step that some process could take next leads to another state; states are
hashable values, met once, and walked breadth first, so that a counterexample is as short as it can be.

Invariants
    I1  Every state that can be reached is visited once, and `wrong` is asked of each.
    I2  `stuck` is asked of every state from which no step leads on.
    I3  A counterexample is a path of real steps from a start.
Leaves out: what the steps are (the models), and fairness: "at last" is asked as "not stuck before".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

State = TypeVar("State", bound=Hashable)


class Model(Protocol[State]):
    """What can be explored. `wrong` and `stuck` say what is wrong with a state, or nothing."""

    def starts(self) -> Iterable[State]: ...
    def steps(self, state: State) -> Iterable[tuple[str, State]]: ...
    def wrong(self, state: State) -> str: ...
    def stuck(self, state: State) -> str: ...


class Counterexample(NamedTuple, Generic[State]):
    """The shortest way into a state that must not be."""

    why: str
    path: list[str]
    state: State

    def __str__(self) -> str:
        return "\n".join([self.why, *(f"  {number:3} {step}" for number, step in enumerate(self.path, 1))])


class Exploration(NamedTuple, Generic[State]):
    """How much there was to see, and what was found."""

    states: int
    transitions: int
    counterexample: Counterexample[State] | None


def explore(model: Model[State], most_states: int = 3_000_000) -> Exploration[State]:
    """Visit everything, up to the first counterexample. MemoryError where there is more than was meant."""
    came_from: dict[State, tuple[State, str] | None] = dict.fromkeys(model.starts())
    waiting = deque(came_from)
    transitions = 0

    def found(why: str, state: State) -> Exploration[State]:
        example = Counterexample(why, list(reversed(list(_way_back(came_from, state)))), state)
        return Exploration(len(came_from), transitions, example)

    while waiting:
        state = waiting.popleft()
        if why := model.wrong(state):
            return found(why, state)
        moved = False
        for step, after in model.steps(state):
            moved = True
            transitions += 1
            if after not in came_from:
                came_from[after] = (state, step)
                waiting.append(after)
        if not moved and (why := model.stuck(state)):
            return found(why, state)
        if len(came_from) > most_states:
            raise MemoryError(f"more than {most_states} states")
    return Exploration(len(came_from), transitions, None)


def _way_back(came_from: dict[State, tuple[State, str] | None], state: State) -> Iterator[str]:
    while (before := came_from[state]) is not None:
        state, step = before
        yield step


def replaced(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    """A tuple with one value changed."""
    return (*values[:place], value, *values[place + 1 :])
