"""Settings: which source wins, and what is refused by name."""

from pathlib import Path

import pytest

from gpu_worker.__main__ import own_runtime_dir
from gpu_worker.config import SettingsRefused, load_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("TANDEM_"):
            monkeypatch.delenv(name)


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('max_rows = 1\npage_size = 16\nnum_pages = 9\ndtype = "bfloat16"\n')
    monkeypatch.setenv("TANDEM_PAGE_SIZE", "32")
    monkeypatch.setenv("TANDEM_NUM_PAGES", "10")
    settings = load_settings(["--config", str(file), "--num-pages", "11"])
    assert (settings.max_rows, settings.page_size, settings.num_pages) == (1, 32, 11)
    assert settings.dtype == "bfloat16"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "worker.toml"
    file.write_text("threads = 3\n")
    monkeypatch.setenv("TANDEM_CONFIG", str(file))
    assert load_settings([]).threads == 3


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("2GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5 GB", 1_500_000_000), ("1.5gib", 3 << 29)],
)
def test_sizes_may_have_units(text: str, num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(["--pool-bytes", text]).pool_bytes == num_bytes
    file = tmp_path / "worker.toml"
    file.write_text(f'keep_free_bytes = "{text}"\n')
    assert load_settings(["--config", str(file)]).keep_free_bytes == num_bytes
    monkeypatch.setenv("TANDEM_KEEP_FREE_BYTES", text)
    assert load_settings([]).keep_free_bytes == num_bytes


def test_nothing_is_saved_and_nothing_slides_unless_asked() -> None:
    settings = load_settings([])
    assert (settings.host_pool_bytes, settings.window, settings.window_sinks) == (0, None, 0)
    settings = load_settings(["--host-pool-bytes", "4GiB", "--window", "1024", "--window-sinks", "4"])
    assert (settings.host_pool_bytes, settings.window, settings.window_sinks) == (4 << 30, 1024, 4)


def test_switches() -> None:
    assert load_settings(["--exit-with-parent"]).exit_with_parent
    assert not load_settings([]).exit_with_parent


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--max-rows", "0"], "max_rows"),
        (["--threads", "many"], "threads"),
        (["--dtype", "int8"], "dtype"),
        (["--pool-bytes", "much"], r"pool_bytes: a size is a number of bytes, or has a unit .* \(got 'much'\)"),
        (["--pool-bytes", "2XB"], "pool_bytes: a size is a number of bytes"),
        (["--keep-free-bytes", "-1"], "keep_free_bytes: a size is"),
        (["--num-pages", "9", "--pool-bytes", "1KiB"], "^num_pages is 9 and pool_bytes is 1024; set one of them"),
        (["--keep-free-bytes", "0", "--pool-bytes", "9"], "^pool_bytes is 9 and keep_free_bytes is 0; set one of them"),
        (["--host-pool-bytes", "-1"], "host_pool_bytes: a size is"),
        (["--window", "0"], r"window: .* greater than or equal to 1 \(got '0'\)"),
        (["--window", "9", "--window-sinks", "-1"], "window_sinks: .* greater than or equal to 0"),
        (["--window-sinks", "4"], "^window_sinks is 4 and there is no window; set window too"),
        (["--config", "/nowhere.toml"], "config file /nowhere.toml does not exist"),
    ],
)
def test_bad_values_are_named(arguments: list[str], problem: str) -> None:
    with pytest.raises(SettingsRefused, match=problem):
        load_settings(arguments)


def test_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(["--max-colums", "3"])
    assert "--max-colums" in capsys.readouterr().err


def test_unknown_file_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text("max_colums = 3\n")
    with pytest.raises(SettingsRefused, match="max_colums: there is no such setting"):
        load_settings(["--config", str(file)])


def test_unknown_variables_are_refused_and_those_of_other_programs_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("TANDEM_MAX_WAITING", "5")
    load_settings([])
    monkeypatch.setenv("TANDEM_MAX_COLUMS", "3")
    with pytest.raises(SettingsRefused, match="TANDEM_MAX_COLUMS"):
        load_settings([])


def test_the_sockets_folder_must_be_this_users_alone(tmp_path: Path) -> None:
    own_runtime_dir(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    own_runtime_dir(tmp_path / "new")
    (tmp_path / "new").chmod(0o750)
    with pytest.raises(ValueError, match="has mode 750; it must be 700"):
        own_runtime_dir(tmp_path / "new")
