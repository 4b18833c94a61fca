"""The publish protocol in every order, its planted faults, and that the model's steps are the code's."""

from __future__ import annotations

import pytest
from code_steps import comments, reader_docstring, writer_comments, writer_docstring
from explorer import Exploration, explore
from publish_model import READER_STEPS, STEPS, TAILS, Kind, Memory, Op, PublishModel, State, Texts

from shmcache import index
from shmcache.index import IndexReader


def publish(key: str) -> Op:
    return Op("publish", key)


def remove(key: str) -> Op:
    return Op("remove", key)


SCRIPTS: dict[str, tuple[list[Op], list[Op]]] = {
    "publish": ([], [publish("K")]),
    "replace": ([publish("K")], [publish("K")]),
    "replace back": ([publish("K"), publish("K")], [publish("K")]),
    "replace twice": ([publish("K")], [publish("K"), publish("K")]),
    "republish": ([publish("K")], [remove("K"), publish("K")]),
    "reuse": ([publish("K")], [remove("K"), publish("L")]),
    "evict": ([publish("K"), publish("L")], [publish("M")]),
    "remove one of two": ([publish("K"), publish("L")], [remove("L")]),
    "replace in full buckets": ([publish("K"), publish("L")], [publish("K")]),
}
TWO_BLOCKS = Texts(blocks={"K": "X", "L": "Y", "M": "X"})
ONE_TAIL = Texts(tails=dict.fromkeys(TAILS, 1))
GET_K: tuple[Kind, str] = ("get", "K")
PREFIX_K: tuple[Kind, str] = ("prefix", "K")


def run(
    script: str,
    *readers: tuple[Kind, str],
    memory: Memory = "tso",
    fault: str = "",
    texts: Texts | None = None,
) -> Exploration[State]:
    faults = [fault] if fault else []
    return explore(PublishModel(*SCRIPTS[script], readers, memory=memory, faults=faults, texts=texts))


@pytest.mark.parametrize("key", ["K", "L", "M"])
@pytest.mark.parametrize("kind", ["get", "prefix"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_no_order_of_steps_shows_a_reader_anything_wrong(script: str, kind: Kind, key: str) -> None:
    found = run(script, (kind, key))
    assert found.counterexample is None, str(found.counterexample)
    assert found.states > 50


@pytest.mark.parametrize(("script", "floor"), [("publish", 8_000), ("replace", 60_000)])
def test_two_readers_beside_the_writer_see_nothing_wrong(script: str, floor: int) -> None:
    found = run(script, GET_K, PREFIX_K)
    assert found.counterexample is None, str(found.counterexample)
    assert found.states > floor


# Two replacements beside two readers are many millions of states.
@pytest.mark.stress
@pytest.mark.parametrize("script", sorted(SCRIPTS.keys() - {"replace twice"}))
def test_two_readers_beside_any_script_see_nothing_wrong(script: str) -> None:
    found = run(script, GET_K, PREFIX_K)
    assert found.counterexample is None, str(found.counterexample)


@pytest.mark.stress
@pytest.mark.parametrize("key", ["K", "L", "M"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_where_loads_pass_each_other_no_script_shows_what_was_not_published(script: str, key: str) -> None:
    found = run(script, ("get", key), memory="weak")
    assert found.counterexample is None, str(found.counterexample)


@pytest.mark.parametrize("key", ["K", "L"])
def test_a_block_slot_that_is_used_again_shows_nothing_of_its_former_block(key: str) -> None:
    found = run("reuse", ("prefix", key), texts=TWO_BLOCKS)
    assert found.counterexample is None, str(found.counterexample)
    assert found.states > 1_000


@pytest.mark.parametrize("script", ["evict", "reuse", "remove one of two", "replace in full buckets"])
def test_texts_of_one_length_that_begin_alike_share_a_bit(script: str) -> None:
    found = run(script, PREFIX_K, texts=ONE_TAIL)
    assert found.counterexample is None, str(found.counterexample)
    assert found.states > 50


@pytest.mark.parametrize(
    ("script", "floor"), [("replace", 5_000), ("replace in full buckets", 8_000), ("republish", 60_000)]
)
def test_where_loads_pass_each_other_too_nothing_is_returned_that_was_not_published(
    script: str, floor: int
) -> None:
    found = run(script, GET_K, memory="weak")
    assert found.counterexample is None, str(found.counterexample)
    assert found.states > floor


def test_a_bit_that_goes_with_its_first_row_is_found() -> None:
    found = run("remove one of two", PREFIX_K, texts=ONE_TAIL, fault="bit goes with its first row")
    assert found.counterexample is not None
    assert "I4: a row has no bit" in found.counterexample.why


FAULTS: dict[str, tuple[str, Memory, str]] = {
    # what is planted: where it shows, and which invariant it breaks
    "no second word load": ("republish", "tso", "I2"),
    "no check word": ("republish", "weak", "I2"),
    "check without the word": ("republish", "weak", "I2"),
    "bit before the row": ("reuse", "tso", "I4"),
    "row leaves before its bit": ("reuse", "tso", "I4"),
    "block leaves before its bit": ("reuse", "tso", "I5"),
    "word before the body": ("reuse", "tso", "I6"),
    "old row leaves first": ("replace", "tso", "I4"),
    "old word before the count": ("replace back", "tso", "I3"),
    "no step 7": ("replace back", "tso", "I3"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    script, memory, invariant = FAULTS[fault]
    found = run(script, GET_K, memory=memory, fault=fault)
    assert found.counterexample is not None
    assert invariant in found.counterexample.why
    assert found.counterexample.path


def test_the_writers_steps_are_named_in_model_docstring_and_code_alike() -> None:
    assert writer_docstring(index) == STEPS
    assert writer_comments(index) == STEPS


def test_the_readers_steps_are_named_in_model_docstring_and_code_alike() -> None:
    documented = reader_docstring(index)
    assert list(documented) == list(READER_STEPS)
    for number, name in READER_STEPS.items():
        assert name in documented[number], f"step {number} is {documented[number]!r} in index.py"
    assert comments(IndexReader._search) == list(READER_STEPS)
