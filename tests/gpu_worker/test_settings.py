"""Settings: the precedence of the sources, and the messages for refused names and values."""

import os
import re
from pathlib import Path

import pytest

from gpu_worker.command_line import load_settings, variable_warnings
from gpu_worker.settings import SettingsRefused, WorkerSettings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TANDEM_"):
            monkeypatch.delenv(name)


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('max_rows = 1\npage_size = 16\nnum_pages = 9\ndtype = "bfloat16"\n')
    monkeypatch.setenv("TANDEM_WORKER_PAGE_SIZE", "32")
    monkeypatch.setenv("TANDEM_WORKER_NUM_PAGES", "10")
    settings = load_settings(["--config", str(file), "--num-pages", "11"])
    assert (settings.max_rows, settings.page_size, settings.num_pages) == (1, 32, 11)
    assert settings.dtype == "bfloat16"


def test_a_variable_can_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "worker.toml"
    file.write_text("threads = 3\n")
    monkeypatch.setenv("TANDEM_WORKER_CONFIG", str(file))
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
    monkeypatch.setenv("TANDEM_WORKER_KEEP_FREE_BYTES", text)
    assert load_settings([]).keep_free_bytes == num_bytes


def test_host_memory_and_windows_are_off_by_default() -> None:
    settings = load_settings([])
    assert (settings.host_pool_bytes, settings.window, settings.window_sinks) == (0, None, 0)
    settings = load_settings(["--host-pool-bytes", "4GiB", "--window", "1024", "--window-sinks", "4"])
    assert (settings.host_pool_bytes, settings.window, settings.window_sinks) == (4 << 30, 1024, 4)


def test_a_switch_can_be_turned_on_and_off() -> None:
    assert load_settings(["--exit-with-parent"]).exit_with_parent
    assert not load_settings(["--no-exit-with-parent"]).exit_with_parent
    assert not load_settings([]).exit_with_parent


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--max-rows", "0"], "^--max-rows is '0'; it must be at least 1$"),
        (["--threads", "many"], "^--threads is 'many'; it must be auto or a whole number$"),
        (["--dtype", "int8"], "^--dtype is 'int8'; it must be auto, float32, bfloat16 or float16$"),
        (["--device", "tpu"], "^--device is 'tpu'; it must be cpu, cuda or cuda:N$"),
        (["--pool-bytes", "much"], "^--pool-bytes is 'much'; it must be a number of bytes, or have a unit such as 5"),
        (["--pool-bytes", "2XB"], "^--pool-bytes is '2XB'; it must be a number of bytes, or"),
        (["--keep-free-bytes", "-1"], "^--keep-free-bytes is '-1'; it must"),
        (["--num-pages", "9", "--pool-bytes", "1KiB"], "^num_pages is 9 and pool_bytes is 1024; set only one of them"),
        (["--keep-free-bytes", "0", "--pool-bytes", "9"], "^pool_bytes is 9 and keep_free_bytes is 0; set only one"),
        (["--host-pool-bytes", "-1"], "^--host-pool-bytes is '-1'; it must"),
        (["--window", "0"], "^--window is '0'; it must be at least 1$"),
        (["--window", "9", "--window-sinks", "-1"], "^--window-sinks is '-1'; it must be at least 0$"),
        (["--window-sinks", "4"], "^window_sinks is 4 and window is not set; set window too"),
        # The scheduler takes no longer name in Join.
        (["--served-name", "é" * 513], "^--served-name has 513 characters; the limit is 512$"),
        (["--served-name", "\udcff"], r"^--served-name is '\\udcff'; it must be UTF-8 text$"),
        (["--ranks", "65"], "^--ranks is '65'; it must be at most 64$"),
        (["--rdzv-id", "-"], r"^--rdzv-id is '-'; it must match \^\[A-Za-z0-9\]"),
        (["--config", "/nowhere.toml"], "config file /nowhere.toml does not exist"),
        (
            ["--max-rows", "0", "--dtype", "x"],
            "^--dtype is 'x'; it must be .*; --max-rows is '0'; it must be at least 1",
        ),
        (["--max-colums", "3"], "^unrecognized arguments: --max-colums 3; --help lists the settings$"),
        (["--max", "3"], "^unrecognized arguments: --max 3"),
        (["--max-rows"], "^argument --max-rows: expected one argument"),
    ],
)
def test_invalid_values_are_refused_with_their_names(arguments: list[str], problem: str) -> None:
    with pytest.raises(SettingsRefused, match=problem):
        load_settings(arguments)


def test_an_invalid_value_is_named_by_its_flag_variable_or_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('page_size = "x"\nexit_with_parent = "perhaps"\n')
    monkeypatch.setenv("TANDEM_WORKER_MAX_ROWS", "lots")
    with pytest.raises(SettingsRefused) as refused:
        load_settings(["--config", str(file), "--threads", "few"])
    assert sorted(str(refused.value).split("; ")) == sorted(
        [
            *(
                "--threads is 'few'",
                "it must be auto or a whole number",
                "TANDEM_WORKER_MAX_ROWS is 'lots'",
                "it must be a whole number",
            ),
            *("page_size is 'x'", "it must be a whole number", "exit_with_parent is 'perhaps'"),
            "it must be true or false",
        ]
    )


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text("max_rows: 3\n")
    with pytest.raises(SettingsRefused, match=f"config file {file} is not valid TOML: "):
        load_settings(["--config", str(file)])


def test_unknown_file_keys_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text("max_colums = 3\n")
    with pytest.raises(SettingsRefused, match="max_colums: there is no such setting"):
        load_settings(["--config", str(file)])


def test_an_unknown_variable_of_the_worker_is_refused_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_WORKER_MAX_COLUMS", "3")
    said = "there is no environment variable TANDEM_WORKER_MAX_COLUMS; did you mean TANDEM_WORKER_MAX_ROWS?"
    with pytest.raises(SettingsRefused, match=f"^{re.escape(said)}$"):
        load_settings([])


def test_variables_of_other_programs_change_nothing_and_give_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"TANDEM_ADDRESS": "127.0.0.1:1", "TANDEM_SCHEDULER_MAX_WAITING": "5", "TANDEM_SCHEDULER_X": "5"}
    set_all(monkeypatch, variables)
    assert load_settings([]).model_dump() == WorkerSettings().model_dump()
    assert variable_warnings(variables) == []


def test_a_shared_variable_sets_both_programs_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"TANDEM_RUNTIME_DIR": "/run/tandem", "TANDEM_LOG_FORMAT": "json", "TANDEM_LOG_LEVEL": "error"}
    set_all(monkeypatch, variables)
    settings = load_settings([])
    assert (str(settings.runtime_dir), settings.log_format, settings.log_level) == ("/run/tandem", "json", "error")
    assert variable_warnings(variables) == []
    monkeypatch.setenv("TANDEM_WORKER_LOG_LEVEL", "debug")
    assert load_settings([]).log_level == "debug"


def test_names_without_a_program_are_ignored_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the worker's own settings."""
    variables = {"TANDEM_MAX_WAITING": "5", "TANDEM_MAX_ROWS": "3", "TANDEM_MODEL": ""}
    set_all(monkeypatch, variables)
    assert load_settings([]).model_dump() == WorkerSettings().model_dump()
    assert variable_warnings(variables) == [
        "ignored TANDEM_MAX_ROWS, TANDEM_MAX_WAITING: variables of this program begin with TANDEM_WORKER_"
    ]


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_threads_are_measured_unless_a_number_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings([]).threads is None
    monkeypatch.setenv("TANDEM_WORKER_THREADS", "2")
    assert load_settings([]).threads == 2
    assert load_settings(["--threads", "auto"]).threads is None
    with pytest.raises(SettingsRefused, match=r"^--threads is '0'; it must be at least 1$"):
        load_settings(["--threads", "0"])


def test_pages_of_a_standby_worker_need_a_standby_worker() -> None:
    with pytest.raises(SettingsRefused, match="standby_pages is 9 and standby is not set; set num_pages instead"):
        load_settings(["--standby-pages", "9"])
    settings = load_settings(["--standby", "--standby-pages", "9", "--num-pages", "5"])
    assert (settings.standby, settings.standby_pages, settings.num_pages) == (True, 9, 5)
