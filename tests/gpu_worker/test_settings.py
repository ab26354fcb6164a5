"""The worker's settings: defaults, and what is refused of a value or of several together."""

import pytest

from gpu_worker.settings import PROGRAM, WorkerSettings
from tandem_contract.settings import SettingError


def load(*flags: str, **variables: str) -> WorkerSettings:
    return PROGRAM.read(flags, variables)


def test_host_memory_and_windows_are_off_by_default() -> None:
    settings = load()
    assert (settings.host_pool_bytes, settings.window, settings.window_sinks) == (0, None, 0)
    settings = load("--host-pool-bytes", "4GiB", "--window", "1024", "--window-sinks", "4")
    assert (settings.host_pool_bytes, settings.window, settings.window_sinks) == (4 << 30, 1024, 4)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--max-rows", "0"], "^--max-rows is 0; it must be a whole number, at least 1$"),
        (["--threads", "many"], "^--threads is 'many'; it must be auto or a whole number$"),
        (["--dtype", "int8"], "^--dtype is 'int8'; it must be one of auto, float32, bfloat16, float16$"),
        (["--device", "tpu"], "^--device is 'tpu'; it must be cpu, cuda or cuda:N$"),
        (["--num-pages", "9", "--pool-bytes", "1KiB"], "^num_pages is 9 and pool_bytes is 1024; set only one of them"),
        (["--keep-free-bytes", "0", "--pool-bytes", "9"], "^pool_bytes is 9 and keep_free_bytes is 0; set only one"),
        (["--keep-free-bytes", "-1"], "^--keep-free-bytes is -1; it must be a whole number, at least 0$"),
        (["--window", "9", "--window-sinks", "-1"], "^--window-sinks is -1; it must be a whole number, at least 0$"),
        (["--window-sinks", "4"], "^window_sinks is 4 and window is not set; set window too"),
        # The scheduler takes no longer name in Join.
        (["--served-name", "é" * 513], "^--served-name has 513 characters; the limit is 512$"),
        (["--ranks", "65"], "^--ranks is 65; it must be a whole number from 1 to 64$"),
        (["--standby-pages", "1"], "^--standby-pages is 1; it must be a whole number, at least 2$"),
        (["--rdzv-id", "-"], r"^--rdzv-id is '-'; it must match \^\[A-Za-z0-9\]"),
    ],
)
def test_invalid_values_are_refused_with_their_names(arguments: list[str], problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        load(*arguments)


def test_threads_are_measured_unless_a_number_is_set() -> None:
    assert load().threads is None
    assert load(TANDEM_WORKER_THREADS="2").threads == 2
    assert load("--threads", "auto", TANDEM_WORKER_THREADS="2").threads is None
    with pytest.raises(SettingError, match=r"^--threads is 0; it must be a whole number, at least 1$"):
        load("--threads", "0")


def test_pages_of_a_standby_worker_need_a_standby_worker() -> None:
    with pytest.raises(SettingError, match="standby_pages is 9 and standby is not set; set num_pages instead"):
        load("--standby-pages", "9")
    settings = load("--standby", "--standby-pages", "9", "--num-pages", "5")
    assert (settings.standby, settings.standby_pages, settings.num_pages) == (True, 9, 5)
