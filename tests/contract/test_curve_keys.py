"""The files with CURVE keys: which are read, which are refused, and that libzmq takes the same texts for keys."""

import os
import random
import stat
from pathlib import Path

import pytest
import zmq

from tandem_contract.files import KeyFileError, read_key


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_key_is_read_without_the_end_of_its_line(tmp_path: Path) -> None:
    key = zmq.curve_keypair()[1]
    assert read_key(written(tmp_path / "key", key + b"\r\n"), is_secret=True) == key


@pytest.mark.parametrize(("mode", "is_secret"), [(0o640, True), (0o604, True), (0o620, False), (0o602, False)])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int, is_secret: bool) -> None:
    path = written(tmp_path / "key", zmq.curve_keypair()[0], mode)
    wanted = mode & (0o700 if is_secret else 0o755)
    with pytest.raises(KeyFileError, match=f"has mode {mode:04o}; .* and have mode {wanted:04o}"):
        read_key(path, is_secret=is_secret)
    path.chmod(wanted)
    read_key(path, is_secret=is_secret)
    assert stat.S_IMODE(path.stat().st_mode) == wanted


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "key", zmq.curve_keypair()[0])
    os.chown(path, 4711, 4711)
    with pytest.raises(KeyFileError, match="belongs to user 4711"):
        read_key(path, is_secret=True)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(KeyFileError, match="is not a file; it must have one key: 40 characters, Z85"):
        read_key(tmp_path / "pipe", is_secret=True)
    for name, problem in ((".", "Is a directory"), ("missing", "No such file or directory")):
        with pytest.raises(KeyFileError, match=f"cannot be read: {problem}"):
            read_key(tmp_path / name, is_secret=True)


def is_key_of_libzmq(text: bytes) -> bool:
    try:
        return len(text) == 40 and bool(zmq.curve_public(text))
    except (ValueError, zmq.ZMQError):
        return False


def test_the_same_texts_are_keys_as_for_libzmq_and_no_message_has_them(tmp_path: Path) -> None:
    draw = random.Random(1)
    edges = [b"", b"x" * 39, b"a" * 41, b"\0" * 40, b"'" * 40, b"#" * 40, b"%nSc0" * 8, b"%nSc1" * 8, b"0" * 40]
    keys = [zmq.curve_keypair()[0] for _ in range(20)]
    spoilt = [key[:i] + bytes([draw.randrange(33, 127)]) + key[i + 1 :] for key in keys for i in range(40)]
    tried = [*edges, *keys, *spoilt]
    found = [is_key_of_libzmq(text) for text in tried]
    assert 10 < sum(found) < len(found) - 10
    for text, is_key in zip(tried, found, strict=True):
        path = written(tmp_path / "key", text)
        if is_key:
            assert read_key(path, is_secret=True) == text
            continue
        with pytest.raises(KeyFileError, match="has no key") as refused:
            read_key(path, is_secret=True)
        assert not text or text.decode() not in str(refused.value)
