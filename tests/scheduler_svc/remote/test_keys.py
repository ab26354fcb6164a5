"""The files with keys: what `tandem keys` makes, which files are refused, and the folder that is read again."""

import errno
import logging
import stat
from pathlib import Path
from unittest import mock

import pytest
import zmq

from scheduler_svc.remote import ADMITTED, AdmittedKeys, listener_of, main, make, scheduler_secret
from tandem_contract import files
from tandem_contract.files import SCHEDULER_SECRET, KeyFileError, read_key
from tandem_contract.settings import SettingError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path / "keys", ["gpu-1", "gpu-2"])
    return tmp_path / "keys"


def test_both_ends_get_matching_keys_and_nobody_else_can_read_them(folder: Path) -> None:
    of_worker = folder / "workers" / "gpu-1"
    public = zmq.curve_public(scheduler_secret(folder))
    assert (of_worker / "scheduler.public").read_bytes().strip() == public
    own = zmq.curve_public((of_worker / "worker.secret").read_bytes().strip())
    assert read_key(folder / ADMITTED / "gpu-1.public", is_secret=False) == own
    modes = {path.is_dir(): stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
    assert modes == {True: 0o700, False: 0o600}


def test_a_second_call_adds_workers_and_keeps_the_keys_that_exist(folder: Path) -> None:
    before = scheduler_secret(folder), read_key(folder / ADMITTED / "gpu-1.public", is_secret=False)
    make(folder, ["gpu-3"])
    assert (scheduler_secret(folder), read_key(folder / ADMITTED / "gpu-1.public", is_secret=False)) == before
    with pytest.raises(KeyFileError, match=r"workers/gpu-3 exists; remove it for new keys, or choose another name"):
        make(folder, ["gpu-3"])
    # The folder was moved to the worker's host.
    (folder / "workers" / "gpu-3").rename(folder / "moved")
    with pytest.raises(KeyFileError, match=r"admitted/gpu-3.public exists; remove it"):
        make(folder, ["gpu-4", "gpu-3"])
    assert sorted(path.name for path in (folder / "workers").iterdir()) == ["gpu-1", "gpu-2"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 65, "a b", "w@x"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeyFileError, match="is not a name of a worker; it must have 1 to 64 letters"):
        make(tmp_path / "keys", [name])


def test_the_command_says_where_each_folder_goes_and_shows_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "keys"), "gpu-1"]) == 0
    shown = capsys.readouterr().out
    assert f"--workers-keys {tmp_path}/keys" in shown
    assert f"worker gpu-1: move {tmp_path}/keys/workers/gpu-1 to its host" in shown
    keys = [path.read_text().strip() for path in (tmp_path / "keys").rglob("*") if path.is_file()]
    assert len(keys) == 5 and not [key for key in keys if key in shown]
    assert main([str(tmp_path / "keys"), "gpu-1"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_a_secret_that_others_can_read_is_refused(folder: Path) -> None:
    (folder / SCHEDULER_SECRET).chmod(0o640)
    with pytest.raises(SettingError, match=r"has mode 0640; it must belong to user \d+ and have mode 0600"):
        scheduler_secret(folder)


@pytest.mark.parametrize(
    ("endpoint", "sentence"),
    [
        ("tcp://0.0.0.0:5", "workers_keys is not set; over TCP workers need keys: `tandem keys DIR` makes keys"),
        ("0.0.0.0:5", "it must be tcp://HOST:PORT with a port from 0 to 65535"),
        ("ipc://x:5", "it must be tcp://HOST:PORT"),
        ("tcp://:5", "it must be tcp://HOST:PORT"),
        ("tcp://h:65536", "it must be tcp://HOST:PORT"),
    ],
)
def test_an_address_without_keys_or_of_another_form_is_refused(endpoint: str, sentence: str) -> None:
    with pytest.raises(SettingError, match=sentence):
        listener_of(endpoint, None)


def test_keys_without_an_address_are_refused(folder: Path) -> None:
    with pytest.raises(SettingError, match="workers_listen is not set; set it to tcp://HOST:PORT too"):
        listener_of("", folder)
    assert listener_of("", None) is None


def test_the_folder_of_admitted_keys_is_read_again_when_it_has_changed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tandem.core")
    admitted = AdmittedKeys(folder / ADMITTED)
    admitted.poll()
    assert sorted(admitted.names.values()) == ["gpu-1", "gpu-2"]
    before = admitted.names
    admitted.poll()
    assert admitted.names is before
    (folder / ADMITTED / "gpu-2.public").rename(folder / ADMITTED / "other.public")
    admitted.poll()
    assert sorted(admitted.names.values()) == ["gpu-1", "other"]
    (folder / ADMITTED / "gpu-1.public").unlink()
    admitted.poll()
    assert sorted(admitted.names.values()) == ["other"]
    assert "the keys of gpu-1 are no longer admitted" in caplog.text


def test_a_wrong_file_admits_nobody_and_a_missing_folder_changes_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    admitted = AdmittedKeys(folder / ADMITTED)
    (folder / ADMITTED / "gpu-1.public").write_text("no key")
    (folder / ADMITTED / "an odd name.public").write_bytes(zmq.curve_keypair()[0])
    (folder / ADMITTED / "notes.txt").write_text("not a key")
    admitted.poll()
    assert sorted(admitted.names.values()) == ["gpu-2"]
    assert caplog.text.count("it admits no worker") == 2
    (folder / ADMITTED).rename(folder / "away")
    admitted.poll()
    admitted.poll()
    assert sorted(admitted.names.values()) == ["gpu-2"]
    assert caplog.text.count("the keys read before stay in force") == 1


def test_a_folder_that_others_can_write_is_refused(folder: Path) -> None:
    (folder / ADMITTED).chmod(0o770)
    with pytest.raises(SettingError, match="has mode 0770; it must belong to user"):
        AdmittedKeys(folder / ADMITTED)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_a_key_that_cannot_be_read_stays_admitted_and_is_read_later(
    number: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    admitted = AdmittedKeys(folder / ADMITTED)
    admitted.poll()
    before = admitted.names
    changed = folder / ADMITTED / "gpu-1.public"
    changed.write_bytes(zmq.curve_keypair()[0])
    make(folder, ["gpu-3"])
    with mock.patch.object(files.os, "open", side_effect=OSError(number, "not now")):
        for _ in range(3):
            admitted.poll()
            assert admitted.names == before
    assert caplog.text.count("gpu-1.public cannot be read: not now; its key of before stays in force") == 1
    assert caplog.text.count("gpu-3.public cannot be read: not now; it admits no worker") == 1
    admitted.poll()
    assert sorted(admitted.names.values()) == ["gpu-1", "gpu-2", "gpu-3"]
    assert changed.read_text() in admitted.names
