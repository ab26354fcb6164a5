"""The holder as a process: which worker gets memory, when another one gets it, and when the holder frees it."""

import mmap
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpu_worker import holder as server
from gpu_worker.shared_pool.messages import HolderClient, HolderError, holder_socket, new_socket
from tests.gpu_worker.holder.user import NUM_PAGES
from tests.rigs.descriptors import open_descriptors
from tests.rigs.processes import Child, Rig

NUM_BYTES = 2 << 20
LIMIT = 4 * NUM_BYTES
PROGRAM = "gpu_worker.holder"
# A file stands for the memory of this device, which the holder never maps.
DEVICE, DEVICE_BYTES = "0123456789abcdef0123456789abcdef", 5 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    folder: Path
    process: Child
    client: HolderClient

    def create(self, num_bytes: int = NUM_BYTES) -> bytes:
        """A new pool of this process, whose memory it does not keep."""
        pool, memory = self.client.create(num_bytes)
        os.close(memory)
        return pool

    def files(self) -> list[str]:
        """What the holder has open."""
        names: list[str] = []
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(OSError):
                names.append(os.readlink(link))
        return names

    def memories(self) -> int:
        """Pools that the holder has open."""
        return sum("tandem-kv-pool" in name for name in self.files())

    def has_open(self, path: Path) -> bool:
        return str(path) in self.files()


class User(Child):
    """A process with a pool, in host memory or, with a file, on the device."""

    def __init__(self, folder: Path, file: Path | None = None) -> None:
        own = [] if file is None else [DEVICE, str(file), str(DEVICE_BYTES)]
        super().__init__("user", ["tests.gpu_worker.holder.user", str(folder), str(NUM_BYTES), *own])
        self.pool_id = bytes.fromhex(self.wait_line("has (.*)").group(1))


Start = Callable[..., User]


def holder() -> Iterator[Holding]:
    with Rig() as rig:
        arguments = ("--runtime-dir", str(rig.runtime_dir), "--max-bytes", str(LIMIT), "--exit-with-parent")
        child = rig.start("holder", PROGRAM, *arguments)
        child.wait_line("holds pools")
        client = HolderClient(rig.runtime_dir)
        yield Holding(folder=rig.runtime_dir, process=child, client=client)
        client.close()


@pytest.fixture
def holding() -> Iterator[Holding]:
    yield from holder()


@pytest.fixture(scope="module")
def unharmed() -> Iterator[Holding]:
    """A holder that several tests send garbage to."""
    yield from holder()


@pytest.fixture
def start(holding: Holding) -> Iterator[Start]:
    """Starts users of the holder."""
    started: list[User] = []

    def user(file: Path | None = None) -> User:
        started.append(User(holding.folder, file))
        return started[-1]

    yield user
    for each in started:
        each.reap()


def test_a_process_that_hangs_keeps_its_pool_until_it_is_dead_and_its_content_is_granted(
    holding: Holding, start: Start
) -> None:
    user = start()
    user.signal(signal.SIGSTOP)
    with pytest.raises(HolderError, match=f"process {user.pid} still uses the pool") as refused:
        holding.client.take(user.pool_id, NUM_BYTES)
    assert refused.value.is_busy
    user.kill()
    [memory] = holding.client.take(user.pool_id, NUM_BYTES)
    assert int.from_bytes(os.pread(memory, 8, 0), "little") == user.pid
    os.close(memory)


def test_a_pool_is_granted_to_one_process(holding: Holding, start: Start) -> None:
    user = start()
    user.kill()
    os.close(*holding.client.take(user.pool_id, NUM_BYTES))
    other = Child("other", ["tests.gpu_worker.holder.user", str(holding.folder), "take", user.pool_id.hex()])
    other.wait_line(f"process {os.getpid()} still uses the pool")
    assert other.wait() == 0


def test_only_its_user_gives_a_pool_back(holding: Holding, start: Start) -> None:
    user = start()
    with pytest.raises(HolderError, match="only its user"):
        holding.client.give_back(user.pool_id)
    own = holding.create()
    assert holding.memories() == 2
    holding.client.give_back(own)
    assert holding.memories() == 1


def test_the_limit_counts_all_pools_and_unused_ones_make_room(holding: Holding, start: Start) -> None:
    user = start()
    holding.create(LIMIT - NUM_BYTES)
    with pytest.raises(HolderError, match=rf"pools in use have {LIMIT} bytes, and the limit is {LIMIT} \(max_bytes\)"):
        holding.client.create(NUM_BYTES)
    user.kill()
    holding.create()
    with pytest.raises(HolderError, match="no such pool"):
        holding.client.take(user.pool_id, NUM_BYTES)
    assert holding.memories() == 2


def test_memory_has_its_size_and_is_not_for_others(holding: Holding) -> None:
    _, memory = holding.client.create(NUM_BYTES)
    assert os.fstat(memory).st_mode & 0o777 == 0o600
    for size in (NUM_BYTES - 4096, NUM_BYTES + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, size)
    with mmap.mmap(memory, NUM_BYTES) as content:
        assert not any(content[:])
    os.close(memory)
    assert holder_socket(holding.folder).stat().st_mode & 0o777 == 0o600


def test_unused_memory_is_counted_as_far_as_it_was_touched(holding: Holding, start: Start) -> None:
    user = start()
    assert holding.client.unused_on("") == (0, 0)
    user.kill()
    assert 0 < holding.client.unused_on("")[0] <= 64 << 10


def test_a_dead_process_s_device_memory_is_granted_with_its_header(
    holding: Holding, start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "device memory"
    path.write_bytes(b"pages")
    user = start(path)
    assert holding.has_open(path) and holding.client.unused_on(DEVICE) == (0, 0)
    user.kill()
    # The limit of the holder is one of host memory.
    assert holding.client.unused_on(DEVICE) == (DEVICE_BYTES, NUM_PAGES)
    assert holding.client.unused_on("another") == (0, 0)
    with pytest.raises(HolderError, match=f"the pool has {DEVICE_BYTES} bytes; {4 << 30} are needed"):
        holding.client.take(user.pool_id, NUM_BYTES, 4 << 30)
    with pytest.raises(HolderError, match="the holder's answer has 2 descriptors; 1 are needed"):
        holding.client.take(user.pool_id, NUM_BYTES)
    before = open_descriptors()
    header, memory = holding.client.take(user.pool_id, NUM_BYTES, DEVICE_BYTES)
    assert int.from_bytes(os.pread(header, 8, 0), "little") == user.pid and os.pread(memory, 9, 0) == b"pages"
    os.close(header)
    os.close(memory)
    assert open_descriptors() == before
    holding.client.give_back(user.pool_id)
    assert not holding.has_open(path) and holding.memories() == 0


def test_unused_device_memory_is_freed_when_a_worker_needs_it(holding: Holding, start: Start, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("first", "second")]
    for path in paths:
        path.touch()
    dead, alive = (start(path) for path in paths)
    dead.kill()
    holding.client.free_unused("another")
    assert holding.has_open(paths[0])
    holding.client.free_unused(DEVICE)
    assert not holding.has_open(paths[0]) and holding.has_open(paths[1])
    with pytest.raises(HolderError, match="no such pool"):
        holding.client.take(dead.pool_id, NUM_BYTES, DEVICE_BYTES)
    with pytest.raises(HolderError, match="still uses the pool"):
        holding.client.take(alive.pool_id, NUM_BYTES, DEVICE_BYTES)


def test_only_its_user_attaches_memory_and_new_memory_replaces_the_old(holding: Holding, start: Start) -> None:
    user = start()
    own, header = holding.client.create(NUM_BYTES, device=DEVICE, pages=3)
    with pytest.raises(HolderError, match="only its user can attach"):
        holding.client.attach(user.pool_id, header, 1)
    in_host, memory = holding.client.create(NUM_BYTES)
    with pytest.raises(HolderError, match="the pool is in host memory"):
        holding.client.attach(in_host, memory, 1)
    with pytest.raises(HolderError, match="its worker died before it served"):
        holding.client.take(own, NUM_BYTES, 1)
    count = len(holding.files())
    for _ in range(3):
        holding.client.attach(own, memory, 1)
    assert len(holding.files()) == count + 1
    for each in (header, memory):
        os.close(each)


def test_descriptors_of_messages_that_are_refused_are_closed(unharmed: Holding) -> None:
    count = 0
    with open("/dev/null") as file, new_socket() as garbage:
        garbage.connect(str(holder_socket(unharmed.folder)))
        for packet in (
            b"garbage",
            b'{"want": "unused"}',
            b'{"want": "attach", "pool_id": "' + b"0" * 32 + b'", "bytes": 1}',
        ):
            socket.send_fds(garbage, [packet], [file.fileno()] * 2)
            assert garbage.recv(8192)
            count = count or len(unharmed.files())
            assert len(unharmed.files()) == count


@pytest.mark.parametrize(
    ("packet", "answer"),
    [
        (b"\x00\xff", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b"[" * 4000, "is not JSON"),
        (b"{}", "want must be create, attach, take, give back, unused or free"),
        (b'{"want": "create", "bytes": -1}', "bytes is -1; it must be a whole number from 1 to 281474976710656"),
        (b'{"want": "create", "bytes": 1e999}', "bytes is inf"),
        (b'{"want": "create", "bytes": true}', "bytes is True"),
        (b'{"want": "create", "bytes": 9, "device": 7}', "device must be a name of at most 64 characters"),
        (b'{"want": "create", "bytes": 9, "device": "x", "pages": 0}', "pages is 0"),
        (b'{"want": "attach", "pool_id": "' + b"0" * 32 + b'", "bytes": 1}', "0 descriptors came with attach"),
        (b'{"want": "free"}', "device is empty"),
        (b'{"want": "take", "pool_id": "zz"}', "pool_id must be 32 hexadecimal digits"),
        (b'{"want": "give back", "pool_id": 7}', "pool_id must be 32 hexadecimal digits"),
        (b" " * 5000, "a packet has more than 4096 bytes"),
    ],
)
def test_garbage_is_answered_with_a_sentence(unharmed: Holding, packet: bytes, answer: str) -> None:
    with new_socket() as garbage:
        garbage.connect(str(holder_socket(unharmed.folder)))
        garbage.send(packet)
        assert answer in garbage.recv(8192).decode()
    assert unharmed.client.unused_on("") == (0, 0)


@pytest.mark.parametrize("flags", [("--runtime-dir", "/etc/passwd"), ("--max-bytes", "lots"), ("--nope",)])
def test_wrong_settings_end_the_holder_with_exit_code_2(flags: tuple[str, ...]) -> None:
    ended = Child("holder", [PROGRAM, *flags])
    code = ended.wait()
    ended.join_output()
    assert (code, len(ended.lines)) == (2, 1), ended.lines


def test_a_second_holder_is_refused_and_a_dead_one_replaced(holding: Holding) -> None:
    arguments = [PROGRAM, "--runtime-dir", str(holding.folder), "--exit-with-parent"]
    second = Child("second", arguments)
    assert second.wait() == 1
    second.wait_line(rf"another holder serves \S+: process {holding.process.pid}$")
    holding.process.kill()
    third = Child("third", arguments)
    third.wait_line("holds pools")
    # The same client finds the new holder.
    holding.create()
    assert third.terminate() == 0
    assert not holder_socket(holding.folder).exists()


def test_a_clean_exit_frees_the_memory(holding: Holding) -> None:
    holding.create()
    assert holding.process.terminate() == 0
    assert not holder_socket(holding.folder).exists()
    with pytest.raises(HolderError, match="no answer from the holder"):
        holding.client.create(NUM_BYTES)


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert server._user_of(ours) is not None
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert server._user_of(ours) is None


def test_a_removed_socket_is_made_again_and_connections_stay(holding: Holding) -> None:
    early = holding.create()
    shutil.rmtree(holding.folder)
    holding.process.wait_line(r"holder\.sock was removed or replaced, and was made again")
    late = HolderClient(holding.folder)
    late.create(NUM_BYTES)
    late.close()
    holding.client.give_back(early)
