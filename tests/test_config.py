"""Settings: three sources, one name each, and messages that hold both values."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmcache import config
from shmcache.config import CoordinatorConfig, Gates, check_namespace, load, parse_size
from shmcache.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("0", 0),
        ("48M", 48 << 20),
        ("48m", 48 << 20),
        ("1.5GiB", 3 << 29),
        ("512 KB", 512 << 10),
        (" 2T ", 2 << 40),
        ("7b", 7),
    ],
)
def test_sizes_are_written_as_people_write_them(written: str | int, size_bytes: int) -> None:
    assert parse_size(written) == size_bytes


@pytest.mark.parametrize("written", ["", "M", "-1", "1e9", "1 2", "1X", "0x10", "half", "1,5G"])
def test_what_is_no_size_is_refused_with_what_was_written(written: str) -> None:
    with pytest.raises(ConfigError, match="is not a size") as caught:
        parse_size(written)
    assert repr(written) in str(caught.value)


@pytest.mark.parametrize("namespace", ["a", "default", "a-1", "0" * 32])
def test_a_namespace_is_lower_case_letters_digits_and_dashes(namespace: str) -> None:
    assert check_namespace(namespace) == namespace


@pytest.mark.parametrize("namespace", ["", "A", "a.b", "a/b", "..", "a b", "a" * 33, "ä", "a\n", "a_b"])
def test_a_namespace_that_could_leave_its_place_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigError, match="must match"):
        check_namespace(namespace)


def test_defaults_are_legal() -> None:
    settings = load({}, environment={})
    assert settings == CoordinatorConfig()
    assert settings.ram_file_bytes is None
    assert Gates() == Gates()


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "shmcache.toml"
    file.write_text('namespace = "of-file"\nram-file-bytes = "1M"\nmax_rows = 10\nlog-level = "debug"\n')
    environment = {"SHMCACHE_RAM_FILE_BYTES": "2M", "SHMCACHE_MAX_ROWS": "20", "UNRELATED": "x"}
    settings = load({"max_rows": 30, "log_level": None}, environment, file)
    assert (settings.namespace, settings.log_level) == ("of-file", "debug")
    assert settings.ram_file_bytes == 2 << 20
    assert settings.max_rows == 30


@pytest.mark.parametrize(
    ("flags", "both_values"),
    [
        ({"max_rows": 0}, r"max_rows \(0\) must be between 1 and 4000000"),
        ({"max_rows": config.MAX_ROWS_LIMIT + 1}, r"max_rows \(4000001\)"),
        ({"ram_file_bytes": "0"}, r"ram_file_bytes \(0\) must be at least 1"),
        ({"log_level": "loud"}, r"log_level \(loud\) must be one of debug"),
        ({"namespace": "No"}, r"namespace 'No' must match"),
        ({"max_rows": "many"}, r"int"),
        ({"ram_file_bytes": "lots"}, r"'lots' is not a size"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_value(flags: dict[str, object], both_values: str) -> None:
    with pytest.raises(ConfigError, match=both_values):
        load(flags, environment={})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_row = 1\n", "unknown max_row; known: namespace"),
        ("max_rows = \n", "Invalid value"),
        ('max_rows = "x"\n', "int"),
        ("ram_file_bytes = 1.5\n", "1.5 is not a size"),
        ("ram_file_bytes = true\n", "True is not a size"),
        ("[ram_file_bytes]\nx = 1\n", "is not a size"),
    ],
)
def test_a_wrong_settings_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load({}, {}, file)


def test_a_settings_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml"):
        load({}, {}, tmp_path / "gone.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        load({}, {}, binary)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cold_min_tokens": 256}, r"cold_min_tokens \(256\) must be >= min_tokens \(512\)"),
        (
            {"cold_max_tokens": 100},
            r"cold_max_tokens \(100\) must be >= cold_min_tokens \(512\)",
        ),
        ({"continued_interval": 0}, r"continued_interval \(0\) must be at least 1"),
        ({"boundary_align_tokens": 100}, r"boundary_align_tokens \(100\) must be a multiple of 64"),
        ({"boundary_align_tokens": 0}, r"boundary_align_tokens \(0\) must be a multiple of 64"),
        ({"session_resume_wait_ms": -1}, r"session_resume_wait_ms \(-1\) must not be negative"),
    ],
)
def test_gates_that_contradict_each_other_are_refused_with_both_values(
    values: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Gates(**values)
