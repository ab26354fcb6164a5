"""Where caches are, with and without a home folder, and what counts as this user's alone."""

import errno
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem_contract import files
from tandem_contract.files import cache_dir, is_private, use_caches
from tests.rigs.small_disk import run_on_small_disk

OTHER_USER = 54_321


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    files._cache_home.cache_clear()
    yield tmp_path
    files._cache_home.cache_clear()


def test_the_variable_wins_over_the_home_folder(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(places))
    assert cache_dir("native") == places / ".cache" / "tandem" / "native"
    assert (places / ".cache" / "tandem").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(places / "x"))
    assert cache_dir("native") == places / "x" / "tandem" / "native"
    monkeypatch.setenv("XDG_CACHE_HOME", "x")
    assert cache_dir("native") == places / ".cache" / "tandem" / "native", "a relative one does not count"


@pytest.mark.parametrize("home", [None, ""])
def test_an_empty_home_is_as_none_for_the_libraries_too(
    places: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    """For most programs an empty one is the root folder."""
    known = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(pwd, "getpwuid", lambda user: pwd.struct_passwd([*known[:5], str(places), known[6]]))
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    assert cache_dir("native") == places / ".cache" / "tandem" / "native"
    environ = {} if home is None else {"HOME": home}
    use_caches(environ)
    assert set(environ) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


def test_without_a_home_folder_it_is_a_private_one(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (places / "file").touch()
    monkeypatch.setenv("HOME", str(places / "file"))
    shared = places / "tmp" / f"tandem-cache-{os.getuid()}"
    assert cache_dir("native") == shared / "native" == cache_dir("native")
    assert shared.stat().st_mode & 0o777 == 0o700


def _made_by_another(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize("trick", [_made_by_another, _link, Path.touch])
def test_a_folder_of_another_user_is_never_taken(places: Path, monkeypatch: pytest.MonkeyPatch, trick: object) -> None:
    monkeypatch.setenv("HOME", "relative")
    taken = places / "tmp" / f"tandem-cache-{os.getuid()}"
    assert callable(trick)
    trick(taken)
    found = cache_dir("native")
    assert found.parent != taken and found.parent.parent == places / "tmp" and is_private(found.parent)
    assert cache_dir("native") == found, "one for the whole process"
    assert not list((places / "tmp").glob("elsewhere/*"))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES])
def test_a_home_that_takes_nothing_is_left_and_named_once(
    places: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    monkeypatch.setenv("HOME", str(places))
    temporary = tempfile.TemporaryFile

    def fails(**options: object) -> object:
        if str(options["dir"]).startswith(str(places / ".cache")):
            raise OSError(error, os.strerror(error))
        return temporary(**options)  # type: ignore[call-overload]

    monkeypatch.setattr(tempfile, "TemporaryFile", fails)
    own = places / "tmp" / f"tandem-cache-{os.getuid()}"
    assert [cache_dir("a"), cache_dir("b")] == [own / "a", own / "b"]
    assert caplog.messages == [
        f"{places}/.cache/tandem cannot be written: {os.strerror(error)}; caches of kernels and models are in {own}, "
        "which may not last; set XDG_CACHE_HOME to a folder that this user can write"
    ]


@pytest.mark.parametrize("left", [0, 20_000])
def test_a_full_home_is_left(tmp_path: Path, left: int) -> None:
    (tmp_path / "home").mkdir()
    code = f"""
import os, sys
from pathlib import Path
from tandem_contract.files import cache_dir
disk = Path(sys.argv[1])
(disk / ".cache" / "tandem").mkdir(parents=True, mode=0o700)
(disk / "left").write_bytes(bytes({left}))
try:
    (disk / "fill").write_bytes(bytes(1 << 20))
except OSError as error:
    print(error.strerror)
(disk / "left").unlink()
print(cache_dir("native").is_relative_to(disk))
"""
    lines = run_on_small_disk(tmp_path / "home", "128k", code, HOME=str(tmp_path / "home"), TMPDIR=str(tmp_path))
    assert lines == ["No space left on device", "False"]


def _as_other_user(home: str | None, code: str, temporary: Path) -> list[str]:
    """Runs the code as another user; returns the lines of stdout and stderr."""
    # That user may not be able to start this Python, or to import from this checkout.
    before = f"import os\nos.setgroups([])\nos.setgid({OTHER_USER})\nos.setuid({OTHER_USER})\n"
    imports = (
        "import random, tempfile, traceback\nfrom tandem_contract.files import cache_dir, is_private, use_caches\n"
    )
    own = {} if home is None else {"HOME": home}
    done = subprocess.run(
        [sys.executable, "-c", imports + before + code], check=True, capture_output=True, text=True,
        env={"TMPDIR": str(temporary), "PYTHONPATH": str(Path(files.__file__).parent.parent), **own}, cwd=temporary,
    )  # fmt: skip
    return (done.stdout + done.stderr).splitlines()


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize(
    ("home", "why"),
    [
        ("/", "/.cache/tandem cannot be written: Permission denied"),
        (None, f"HOME is not set, and user {OTHER_USER} has no home folder"),
        ("", f"HOME is not set, and user {OTHER_USER} has no home folder"),
        ("relative", "HOME is relative, which is not an absolute path"),
        ("/root", "/root/.cache/tandem cannot be written: Permission denied"),
        ("/nonexistent", "the home folder /nonexistent cannot be used: No such file or directory"),
        ("/proc", "/proc/.cache/tandem cannot be written: No such file or directory"),
        ("{other}", "the home folder {other} belongs to user 1"),
    ],
)
def test_a_user_without_a_home_gets_a_private_folder_and_the_libraries_too(home: str | None, why: str) -> None:
    code = """
use_caches(os.environ)
print(cache_dir("native"), is_private(cache_dir("")))
names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "HF_HOME")
print(*(os.environ[name] for name in names))
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        temporary, other = Path(folder) / "t", Path(folder) / "other"
        for each in (temporary, other):
            each.mkdir()
            each.chmod(0o777)
        Path(folder).chmod(0o755)
        os.chown(other, 1, 1)
        given = None if home is None else home.format(other=other)
        first, second, *warnings = _as_other_user(given, code, temporary)
        own = temporary / f"tandem-cache-{OTHER_USER}"
        assert first == f"{own}/native True"
        assert second == f"{own}/inductor {own}/inductor/triton {own}/cuda {own}/huggingface"
        [warning] = warnings
        assert warning.startswith(why.format(other=other)) and f"are in {own}, which may not last" in warning
        assert list(other.iterdir()) == [] and [each.name for each in temporary.iterdir()] == [own.name]


def test_libraries_keep_what_the_user_has_set_and_models_that_are_there(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(places))
    environ = {"TORCHINDUCTOR_CACHE_DIR": "/k"}
    use_caches(environ)
    assert environ == {"TORCHINDUCTOR_CACHE_DIR": "/k", "TRITON_CACHE_DIR": "/k/triton"}
    # A file has the name of the folder, so that the rest of the cache is only for reading.
    (places / ".cache" / "huggingface").mkdir()
    (places / ".cache" / "tandem").rmdir()
    (places / ".cache" / "tandem").touch()
    files._cache_home.cache_clear()
    environ = {"HOME": str(places)}
    use_caches(environ)
    own = str(places / "tmp" / f"tandem-cache-{os.getuid()}")
    assert environ["CUDA_CACHE_PATH"] == f"{own}/cuda" and "HF_HOME" not in environ


@pytest.mark.parametrize(("mode", "private"), [(0o600, True), (0o644, True), (0o620, False), (0o602, False)])
def test_what_others_can_write_is_not_private(places: Path, mode: int, private: bool) -> None:
    for path in (places / "file", places / "folder"):
        path.touch() if path.name == "file" else path.mkdir()
        path.chmod(mode | (0o100 if path.is_dir() else 0))
        assert is_private(path) is private
    (places / "link").symlink_to(places / "file")
    assert not is_private(places / "link")
