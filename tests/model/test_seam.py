"""Behind a row's own tokens follow the prompt's remaining ones, or the row is passed over."""

from __future__ import annotations

from shmcache.workers.render import Text
from shmcache.workers.seam import Joined, join

#                   [ab]     [c]   [def]
PROMPT = Text(tokens=[10, 11, 12], text=b"abcdef", ends=[2, 3, 6])


def test_the_callers_remaining_tokens_follow_the_row() -> None:
    joined = join(PROMPT, [10, 11], 3, may_end_one_earlier=False)
    assert joined == Joined([10, 11, 12], keep=2)
    assert joined.is_exact
    assert joined.longer_by(PROMPT) == 0


def test_the_rows_ids_stand_for_its_text_even_where_there_are_more_of_them() -> None:
    joined = join(PROMPT, [1, 2, 3], 3, may_end_one_earlier=False)
    assert joined == Joined([1, 2, 3, 12], keep=3)
    assert joined.longer_by(PROMPT) == 1


def test_a_row_that_ends_inside_a_token_is_passed_over() -> None:
    assert join(PROMPT, [1], 1, may_end_one_earlier=True) is None
    assert join(PROMPT, [1], 5, may_end_one_earlier=True) is None


def test_of_a_row_that_is_the_whole_prompt_the_last_token_is_decoded_again() -> None:
    assert join(PROMPT, [10, 11, 12], 6, may_end_one_earlier=True) == Joined([10, 11, 12], keep=2)
    assert join(PROMPT, [10, 11, 12], 6, may_end_one_earlier=False) is None


def test_a_row_of_one_token_that_is_the_whole_prompt_saves_nothing() -> None:
    prompt = Text(tokens=[10], text=b"ab", ends=[2])
    assert join(prompt, [10], 2, may_end_one_earlier=True) is None
    assert not Joined([10], keep=0).is_exact
