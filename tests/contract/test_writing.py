"""Files that a service writes beside its work, on disks that are full, fail, or become read-only."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_contract.writing import RecordFile
from tests.rigs.small_disk import FullDisk, run_on_small_disk

LOG = logging.getLogger("tandem.test")
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


@pytest.mark.parametrize("error", ERRORS)
def test_a_failure_is_said_once_and_again_after_it_worked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    disk, path = FullDisk(error), tmp_path / "file"
    file = RecordFile(path, log=LOG, what="the file", consequence="it goes on", write=disk.write)
    assert file.append(b"one\n")
    for lost in (3, 1):
        disk.room = 2
        for record in (b"two\n", b"three\n", b"four\n")[:lost]:
            assert not file.append(record)
        disk.room = None
        assert file.append(b"five\n", 2)
    file.close()
    assert path.read_bytes() == b"one\nfive\nfive\n", "no part of a record is before another"
    failed = f"the file {path} cannot be written: {os.strerror(error)}; it goes on"
    again = f"the file {path} is written again; records lost meanwhile: "
    assert caplog.messages == [failed, f"{again}3", failed, f"{again}1"]


def test_a_part_that_cannot_be_cut_yet_hides_no_later_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = FullDisk(errno.EIO), tmp_path / "file"
    file = RecordFile(path, log=LOG, what="the file", consequence="it goes on", write=disk.write)
    assert file.append(b"one\n")

    def fails(descriptor: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fails)
        disk.room = 2
        assert not file.append(b"two\n")
        disk.room = None
        assert not file.append(b"three\n"), "it would follow half a record"
        assert path.read_bytes() == b"one\ntw"
    assert file.append(b"four\n")
    assert path.read_bytes() == b"one\nfour\n"
    file.close()


FILLED = """
import logging, os, sys
from pathlib import Path
from tandem_contract.writing import RecordFile
logging.basicConfig(stream=sys.stdout, format="%(message)s")
disk = Path(sys.argv[1])
file = RecordFile(disk / "file", log=logging.getLogger("x"), what="the file", consequence="it goes on")
filler = os.open(disk / "fill", os.O_WRONLY | os.O_CREAT)
wrote = [file.append(b"%07d\\n" % i * 512) for i in range(100)]
os.close(filler)
lost = wrote.count(False)
print(0 < lost < 100 and wrote == sorted(wrote, reverse=True))
lines = (disk / "file").read_bytes()
print(len(lines) == (100 - lost) * 4096)
os.unlink(disk / "ballast")
print(file.append(b"after!!\\n"))
print((disk / "file").read_bytes() == lines + b"after!!\\n")
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    code = FILLED.replace("filler = ", '(disk / "ballast").write_bytes(bytes(64 << 10))\nfiller = ')
    lines = run_on_small_disk(tmp_path / "disk", "256k", code)
    assert [line for line in lines if line in ("True", "False")] == ["True"] * 4
    said = [line for line in lines if "the file" in line]
    assert len(said) == 2 and said[0].endswith("file cannot be written: No space left on device; it goes on")
    assert "is written again" in said[1]


def test_a_limit_of_file_sizes_ends_no_process(tmp_path: Path) -> None:
    code = """
import logging, resource, sys
from pathlib import Path
from tandem_contract.writing import RecordFile
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
file = RecordFile(Path(sys.argv[1]), log=logging.getLogger("x"), what="the file", consequence="it goes on")
print(file.append(b"1234567\\n"), file.append(b"1234567\\n"), file.append(b"1\\n"), file.trouble.cause)
print(Path(sys.argv[1]).read_bytes())
"""
    argv = [sys.executable, "-c", code, str(tmp_path / "file")]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    assert done.stdout == "True False True \nb'1234567\\n1\\n'\n"
