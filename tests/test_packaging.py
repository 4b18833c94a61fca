"""A built wheel works in an environment of its own, and declares what it imports: no more and no less."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_SOURCES = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist")

# Import names that are not spelled like their distribution.
IMPORT_NAMES = {"llama-cpp-python": "llama_cpp"}

# Development dependencies that are run and not imported: the file and the words that show it.
RUN_BY_NAME = {
    "build": ("tests/test_packaging.py", '"-m", "build"'),
    "mypy": ("Makefile", "$(BIN)/mypy"),
    "pytest_timeout": ("pyproject.toml", "\ntimeout = "),
    "ruff": ("Makefile", "$(BIN)/ruff check"),
    "setuptools": ("tests/test_packaging.py", '"--no-isolation"'),
    # llama-cpp-python's own server, which the README's recipe starts: its extra would compile llama.cpp anew.
    **dict.fromkeys(
        ("fastapi", "pydantic_settings", "PyYAML", "sse_starlette", "starlette_context"),
        ("README.md", "from llama_cpp.server"),
    ),
}


def run(*command: str | Path, **options: object) -> str:
    """Standard output of a command that must succeed; its errors are shown when it does not."""
    done = subprocess.run(command, text=True, capture_output=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, because setuptools leaves build/ and egg-info where it works."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "tree", True, NOT_SOURCES))


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """A wheel built from the tree."""
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", source, cwd=source)
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel, and sees our dependencies but not our sources.

    The dependencies come by a path line from the environment that runs this test, so nothing is downloaded;
    path lines of path lines are not followed, which leaves the editable install out.
    """
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def file_names(wheel: Path) -> set[str]:
    """Names in a wheel, its metadata folder left out."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_takes_only_our_own_import_name(wheel: Path) -> None:
    assert {name.partition("/")[0] for name in file_names(wheel)} == {"shmcache"}


def test_the_wheel_holds_every_module_and_data_file_of_the_tree(wheel: Path) -> None:
    expected = {"shmcache/py.typed"}
    for folder, name in [
        ("shmcache", "shmcache"),
        ("workers", "shmcache/workers"),
        ("tools", "shmcache/tools"),
    ]:
        files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".json")]
        expected |= {f"{name}/{path.relative_to(ROOT / folder)}" for path in files}
    assert file_names(wheel) == expected


def test_a_wheel_made_from_the_sdist_is_the_same(source: Path, wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, source, cwd=source)
    (again,) = tmp_path.glob("*.whl")
    assert file_names(again) == file_names(wheel)


@pytest.mark.parametrize("command", ["shmcache", "shmcache-coordinator"])
def test_an_installed_command_answers_help(fresh: Path, tmp_path: Path, command: str) -> None:
    assert "usage: " + command in run(fresh / "bin" / command, "--help", cwd=tmp_path)


def test_the_installed_package_is_whole_and_is_the_wheels(fresh: Path, tmp_path: Path) -> None:
    code = "import shmcache, shmcache.workers, shmcache.tools.main; print(shmcache.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    place = run(fresh / "bin" / "python", "-c", code, cwd=tmp_path, env=environment)
    assert place.startswith(str(fresh))


def imported(*folders: str) -> set[str]:
    """Top-level names that the files of these folders import, inside functions too."""
    names = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names.add((node.module or "").partition(".")[0])
    return names


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"]) - {"dev"}


def declared(*extras: str) -> set[str]:
    """Import names of the declared dependencies, or of those of the extras."""
    lists = [PROJECT["optional-dependencies"][extra] for extra in extras] or [PROJECT["dependencies"]]
    names = [re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0] for lines in lists for line in lines]
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


def test_every_declared_dependency_is_imported() -> None:
    used = imported("shmcache", "workers", "tools")
    assert not declared() - used
    assert not declared(*EXTRAS) - used


def test_every_development_dependency_is_imported_or_run() -> None:
    run = {name for name, (file, words) in RUN_BY_NAME.items() if words in (ROOT / file).read_text()}
    used = imported("tests", "bench", "shmcache", "workers", "tools")
    idle = {name for name in declared("dev") if name.removeprefix("types_") not in used | run}
    assert not idle


def test_everything_imported_is_declared() -> None:
    ours = {"shmcache", "bench", *sys.stdlib_module_names}
    library = imported("shmcache", "workers", "tools") - ours
    assert not library - declared() - declared(*EXTRAS)
