"""Files of certificates that are followed: when they are used again, and what is logged."""

import logging
import ssl
from pathlib import Path

import pytest

from tandem_contract.certificates import Followed

log = logging.getLogger("tandem.test")


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(24, "Too many open files"), ssl.SSLError("wrong")]
)
def test_files_that_could_not_be_used_are_tried_again(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    path, errors, uses = tmp_path / "cert.pem", [error, error], list[str]()
    path.write_text("old")

    def use() -> None:
        if errors:
            raise errors.pop()
        uses.append(path.read_text())

    followed = Followed([path], use, log)
    assert not followed.look()
    path.write_text("newer")
    # Nothing of the file changes any more.
    assert [followed.look() for _ in range(4)] == [False, False, True, False]
    assert uses == ["newer"]
    assert caplog.text.count("cannot be used") == 1


def test_a_changed_mode_or_owner_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text("one")
    followed = Followed([path], path.read_text, log)
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.chmod(0o600)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert followed.look() and not followed.look()


def test_missing_files_are_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cert.pem"
    path.write_text("one")
    followed = Followed([path], path.read_text, log)
    path.unlink()
    assert not followed.look() and not followed.look()
    assert caplog.text.count("No such file") == 1
    path.write_text("one")
    assert followed.look()
