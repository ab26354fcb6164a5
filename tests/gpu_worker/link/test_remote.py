"""A scheduler on another host: keys and addresses that are refused, Join over CURVE, handshakes that fail."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
import zmq.utils.z85
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.__main__ import check_before_imports
from gpu_worker.link.connection import check_address, read_keys
from gpu_worker.link.link import Link
from gpu_worker.settings import BUNDLED_MODEL, WorkerSettings
from tandem_contract.settings import SettingError
from tests.gpu_worker.link.test_link import Core, EchoRunner, serve
from tests.rigs.waiting import TIMEOUT_SECONDS

ADDRESS = "tcp://127.0.0.1:1"


def make_keys(folder: Path, scheduler: bytes) -> Path:
    folder.mkdir(mode=0o700)
    for name, key in (("worker.secret", zmq.curve_keypair()[1]), ("scheduler.public", scheduler)):
        (folder / name).write_bytes(key + b"\n")
        (folder / name).chmod(0o600)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys", zmq.curve_keypair()[0])


@pytest.mark.parametrize(
    ("connect", "problem"),
    [
        *(
            (connect, r"it must be tcp://HOST:PORT with a port from 1 to 65535$")
            for connect in ("tcp://h", "h:5", "ipc:///tmp/x", "tcp://h:0", "tcp://h:65536", "tcp://a b:5")
        ),
        # A wildcard is no host.
        *(
            (f"tcp://{host}:5", r"name one at which the scheduler listens, such as tcp://127.0.0.1:5 on this")
            for host in ("0.0.0.0", "[::]", "*")
        ),
    ],
)
def test_addresses_of_another_form_are_refused(connect: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_address(connect)


@pytest.mark.parametrize("connect", ["tcp://h:5", "tcp://10.0.0.1:65535", "tcp://[fe80::1]:5"])
def test_addresses_of_hosts_are_accepted(connect: str) -> None:
    check_address(connect)


def test_an_address_without_keys_is_refused_with_the_command_that_makes_them(tmp_path: Path) -> None:
    settings = WorkerSettings(connect=ADDRESS, runtime_dir=tmp_path / "run")
    with pytest.raises(SettingError, match=r"keys is not set; .*`tandem keys DIR NAME` on the scheduler's host"):
        check_before_imports(settings)


def test_a_worker_of_another_host_needs_no_key_of_a_runtime_folder(folder: Path, tmp_path: Path) -> None:
    settings = WorkerSettings(connect=ADDRESS, keys=folder, runtime_dir=tmp_path / "run", model=str(BUNDLED_MODEL))
    check_before_imports(settings)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"keys": "/k"}, "keys is /k and connect is not set"),
        ({"connect": ADDRESS, "keys": "/k", "shared_pool": "on"}, "the pages of a worker on another host end with it"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        WorkerSettings.model_validate(settings)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            lambda folder: (folder / "worker.secret").chmod(0o644),
            r"worker.secret belongs to user \d+ and has mode 0644; .* have mode 0600",
        ),
        (
            lambda folder: (folder / "worker.secret").write_bytes(b"a secret"),
            r"worker.secret has no key; it must have one key: 40 characters, Z85; `tandem keys DIR NAME`",
        ),
        (
            lambda folder: (folder / "scheduler.public").unlink(),
            r"scheduler.public cannot be read: No such file or directory; `tandem keys DIR NAME`",
        ),
    ],
    ids=["open to all", "without a key", "missing"],
)
def test_files_that_cannot_be_trusted_are_refused(folder: Path, damage: Callable[[Path], object], problem: str) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=problem) as refused:
        read_keys(folder, ADDRESS)
    assert "a secret" not in str(refused.value)


def test_the_secret_is_not_shown_with_the_keys(folder: Path) -> None:
    keys = read_keys(folder, ADDRESS)
    assert keys.secret.decode() not in repr(keys)


class Far:
    """A ROUTER with CURVE, a check of keys that says `admits`, and a link that is served on this thread."""

    def __init__(self, tmp_path: Path) -> None:
        self.public, secret = zmq.curve_keypair()
        # Not that of other tests, because one context has one check of keys.
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.zap = self.context.socket(zmq.REP)
        self.zap.bind("inproc://zeromq.zap.01")
        self.core = Core("inproc://unused", self.context)
        self.core.socket.curve_server, self.core.socket.curve_secretkey = True, secret
        self.core.socket.zap_domain = b"workers"
        port = self.core.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.keys = make_keys(tmp_path / "far", self.public)

    def answer(self, status: bytes) -> str:
        """Answers one question; returns the worker's public key."""
        assert self.zap.poll(1000 * TIMEOUT_SECONDS)
        version, request, *_, key = self.zap.recv_multipart()
        self.zap.send_multipart([version, request, status, b"", b"", b""])
        return zmq.utils.z85.encode(key).decode()

    def run(self, script: Callable[[], None]) -> None:
        curve = read_keys(self.keys, self.endpoint)
        link = Link(self.endpoint, pb.Join(model="echo"), EchoRunner(), key=None, max_in_flight=2, curve=curve)
        try:
            serve(link, script)
        finally:
            self.core.socket.close()
            self.zap.close(0)
            self.context.term()


def test_a_worker_joins_over_curve_without_a_key_and_reports_what_it_answered(tmp_path: Path) -> None:
    far = Far(tmp_path)

    def script() -> None:
        own = far.answer(b"200")
        assert own.encode() == read_keys(far.keys, far.endpoint).public
        join = far.core.expect("join").join
        assert (join.model, join.key) == ("echo", b"")
        far.core.say(joined=pb.Joined(generation=4))
        for step in (1, 2):
            far.core.compute(4, step)
        beat = far.core.expect("heartbeat").heartbeat
        assert (beat.phase, beat.num_in_flight, beat.generation, beat.last_step) == ("ready", 0, 4, 2)
        far.core.say(joined=pb.Joined(generation=1))
        beat = far.core.expect("heartbeat").heartbeat
        assert (beat.generation, beat.last_step) == (0, 0)

    far.run(script)


def test_a_key_that_is_not_admitted_is_tried_again_and_the_log_says_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    far, own = Far(tmp_path), list[str]()

    def script() -> None:
        own.append(far.answer(b"400"))
        far.answer(b"200")
        far.core.expect("join")

    caplog.set_level(logging.INFO)
    far.run(script)
    [line] = [record.getMessage() for record in caplog.records if "ended" in record.getMessage()]
    assert f"it does not admit this worker's public key {own[0]}; put the key into a file NAME.public" in line


def test_the_key_of_another_scheduler_is_named_as_the_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    far = Far(tmp_path)
    (far.keys / "scheduler.public").write_bytes(zmq.curve_keypair()[0])
    logged = threading.Event()
    caplog.handler.addFilter(
        lambda record: logged.set() or True if "another scheduler" in record.getMessage() else True
    )

    def script() -> None:
        assert logged.wait(TIMEOUT_SECONDS)

    far.run(script)
    assert f"the handshake failed: {far.keys}/scheduler.public may be the key of another scheduler" in caplog.text
