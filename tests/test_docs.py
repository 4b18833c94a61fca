"""What the documents name exists: tests, make targets, commands, options, Python names."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from pathlib import Path

import pytest

from shmcache import server
from shmcache.tools.main import make_parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INTERNALS = (ROOT / "INTERNALS.md").read_text(encoding="utf-8")
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def code_blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Every option of a command and of its subcommands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found |= options(command)
    return found


def test_every_test_that_internals_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", INTERNALS)
    assert named
    missing = []
    for file, name in named:
        path = ROOT / file
        defined = ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else ()
        if name not in {node.name for node in defined if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{file}::{name}")
    assert not missing


def test_every_file_that_internals_names_exists() -> None:
    named = set(re.findall(r"`((?:shmcache|workers|tools|tests|bench|\.ci)/[\w./-]*)`", INTERNALS))
    assert not {name for name in named if not (ROOT / name).exists()}


@pytest.mark.parametrize("document", ["README.md", ".ci/run"])
def test_every_make_target_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE))
    assert named
    assert named <= MAKE_TARGETS


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in code_blocks(README, "sh")[0]
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


def test_every_option_that_the_readme_names_exists() -> None:
    ours = options(make_parser()) | options(server.arguments())
    others = {"--preload", "--shm-size", "--trace"}  # gunicorn's, docker's and a bench's
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", README)) <= ours | others


def test_the_settings_table_names_every_option_of_the_coordinator() -> None:
    table = set(re.findall(r"^\| `(--[a-z-]+)` ", README, re.MULTILINE))
    assert table == options(server.arguments()) - {"--help", "-h", "--config", "--version"}


def test_every_command_in_the_readme_is_understood() -> None:
    for line in filter(None, "\n".join(code_blocks(README, "sh")).splitlines()):
        command, *arguments = line.split()
        if command == "shmcache":
            make_parser().parse_args(arguments)
        elif command == "shmcache-coordinator":
            server.arguments().parse_args(arguments)


def test_the_readmes_python_uses_names_that_exist() -> None:
    for block in code_blocks(README, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shmcache"):
                module = importlib.import_module(node.module or "")
                assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]
