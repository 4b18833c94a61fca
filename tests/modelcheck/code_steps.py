"""Which numbered steps does the code say it has? Its docstrings and its comments, read as they stand.

A step is a docstring line `    P1 body  …` or `    1 find …`, and a comment `# P1 body` or `# 4, 5, 6` at the
end of the line of code that takes it.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable
from types import FrameType, ModuleType

_WRITER_LINE = re.compile(r"^ {4}([PR]\d) (.+?)(?:  |$)", re.MULTILINE)
_READER_LINE = re.compile(r"^ {4}(\d) (.+)$", re.MULTILINE)
_WRITER_COMMENT = re.compile(r"# ([PR]\d) (.+)$", re.MULTILINE)
_READER_COMMENT = re.compile(r"# (\d(?:, \d)*)$", re.MULTILINE)


def writer_docstring(module: ModuleType) -> dict[str, str]:
    """The writer's steps by the module's docstring, in its order."""
    return dict(_WRITER_LINE.findall(inspect.getdoc(module) or ""))


def writer_comments(module: ModuleType) -> dict[str, str]:
    """The writer's steps by the comments in the code."""
    return dict(_WRITER_COMMENT.findall(inspect.getsource(module)))


def reader_docstring(module: ModuleType) -> dict[int, str]:
    """The reader's steps by the module's docstring, the first line of each."""
    return {int(step): what for step, what in _READER_LINE.findall(inspect.getdoc(module) or "")}


def comments(function: Callable[..., object]) -> list[int]:
    """The numbers in the order in which a function's lines name them."""
    lines = _READER_COMMENT.findall(inspect.getsource(function))
    return [int(step) for line in lines for step in line.split(", ")]


def step_at(frame: FrameType | None) -> str:
    """The writer's step that the innermost marked line on the stack takes; empty where there is none."""
    while frame is not None:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if match := _WRITER_COMMENT.search(line.rstrip()):
            return match[1]
        frame = frame.f_back
    return ""
