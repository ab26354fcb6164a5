"""Workers on other hosts: the files of their keys, which of them are admitted, and the address at which they connect.

Owns what `python -m scheduler_svc.remote` makes, which is `tandem keys`; the present keys of the folder `admitted`,
where a file that is removed, or that no longer has a key, admits no worker, and a file or folder that cannot be read
changes nothing but the log; the thread that answers libzmq whether a key is admitted (ZAP, RFC 27); and the context of
the socket, so that encryption and connections of strangers have an I/O thread of their own.
"""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import argparse
import logging
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
import zmq.utils.z85

from tandem_contract import private_file
from tandem_contract.files import (
    HANDSHAKE_MS,
    HEARTBEAT_MS,
    HEARTBEAT_TIMEOUT_MS,
    SCHEDULER_PUBLIC,
    SCHEDULER_SECRET,
    WORKER_SECRET,
    FileState,
    KeyFileError,
    UnreadKeyError,
    check_owner,
    read_key,
    state_of,
)
from tandem_contract.needed import NeededThread
from tandem_contract.plural import numbered
from tandem_contract.settings import SettingError

if TYPE_CHECKING:
    from tandem.internal.v1 import worker_pb2

log = logging.getLogger("tandem.core")

ADMITTED, WORKERS, PUBLIC_SUFFIX = "admitted", "workers", ".public"
HOW_TO_MAKE = "`tandem keys DIR` makes keys"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_KEYS = 1024
# The names of the files, and what shows that one has changed.
_State = list[tuple[str, FileState | None]]
# Where libzmq asks about keys, and in which version.
_ENDPOINT, _VERSION = "inproc://zeromq.zap.01", b"1.0"
_POLL_SECONDS, _REPORT_SECONDS = 1.0, 10.0
# Keys named in the log between two reports; others are counted.
_MAX_NAMED = 8
_ADDRESS = re.compile(r"tcp://(?P<host>[^\s:/]+|\*|\[[0-9A-Fa-f:.%]+\]):(?P<port>\d{1,5})")
_DESCRIPTION = """\
Make the CURVE keys with which workers on other hosts prove their identity, and with which both sides encrypt. The
scheduler's keys are made once; a later call for the same folder adds workers."""
_EPILOG = """\
Where each file goes:
  DIR/scheduler.secret      stays on the scheduler's host: --workers-keys DIR
  DIR/admitted/NAME.public  stays there too; without this file the worker NAME is shut out, within seconds
  DIR/workers/NAME/         move this folder to the host of worker NAME: --keys FOLDER; it has worker.secret and
                            scheduler.public

Files have mode 0600. Both programs refuse a secret that others can read.

Example:
  tandem keys ~/tandem-keys gpu-1 gpu-2
  make run-scheduler WORKERS_LISTEN=tcp://0.0.0.0:50060 WORKERS_KEYS=~/tandem-keys
  make run-worker CONNECT=tcp://scheduler-host:50060 KEYS=~/gpu-1     # on gpu-1, with the folder workers/gpu-1"""


def scheduler_secret(folder: Path) -> bytes:
    """Returns the scheduler's secret key, Z85. Raises SettingError if it cannot be trusted."""
    try:
        return read_key(folder / SCHEDULER_SECRET, is_secret=True)
    except KeyFileError as error:
        raise SettingError(f"workers_keys: {error}; {HOW_TO_MAKE}") from None


def make(folder: Path, names: list[str]) -> None:
    """Makes the keys of these workers, and those of the scheduler unless the folder has them. Raises KeyFileError."""
    for name in names:
        if not NAME.fullmatch(name):
            raise KeyFileError(
                f"{name[:80]!r} is not a name of a worker; it must have 1 to 64 letters, digits, dots, dashes or "
                "underscores and begin with a letter or digit"
            )
    try:
        for made in (folder, folder / ADMITTED, folder / WORKERS):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_owner(made, made.stat(), 0o077)
        of_workers = {name: (folder / WORKERS / name, folder / ADMITTED / f"{name}{PUBLIC_SUFFIX}") for name in names}
        if taken := [path for paths in of_workers.values() for path in paths if path.exists()]:
            raise KeyFileError(f"{taken[0]} exists; remove it for new keys, or choose another name")
        if not (folder / SCHEDULER_SECRET).exists():
            _write(folder / SCHEDULER_SECRET, zmq.curve_keypair()[1])
        of_scheduler = zmq.curve_public(read_key(folder / SCHEDULER_SECRET, is_secret=True))
        if not (folder / SCHEDULER_PUBLIC).exists():
            _write(folder / SCHEDULER_PUBLIC, of_scheduler)
        for of_worker, admitted in of_workers.values():
            of_worker.mkdir(mode=0o700)
            public, secret = zmq.curve_keypair()
            _write(of_worker / WORKER_SECRET, secret)
            _write(of_worker / SCHEDULER_PUBLIC, of_scheduler)
            _write(admitted, public)
    except OSError as error:
        raise KeyFileError(f"{error.filename or folder}: {error.strerror}") from None


def _write(path: Path, key: bytes) -> None:
    with private_file.create(path) as file:
        file.write(key + b"\n")


class AdmittedKeys:
    """`names` maps each admitted key (Z85) to its file's name. Replaced, never changed: threads may read it."""

    def __init__(self, folder: Path) -> None:
        """Checks the folder; `poll` reads it. Raises SettingError if it cannot be read, or others can write it."""
        self._folder = folder
        self._state: _State | None = None
        self._problem = ""
        # What is wrong with single files; and whether one could not be read, so that the next look tries again.
        self._problems = set[str]()
        self._has_unread = False
        self.names: Mapping[str, str] = {}
        try:
            self._found()
        except (OSError, KeyFileError) as error:
            raise SettingError(f"workers_keys: {_reason(folder, error)}; {HOW_TO_MAKE}") from None

    def poll(self) -> None:
        """Reads the folder again if it has changed."""
        try:
            self._read_again()
            self._problem = ""
        except (OSError, KeyFileError) as error:
            problem = _reason(self._folder, error)
            if problem != self._problem:
                self._problem = problem
                log.error("workers_keys: %s; the keys read before stay in force", problem)

    def _found(self) -> _State:
        """Returns the files of keys, in the order of their names. Raises OSError, KeyFileError."""
        check_owner(self._folder, self._folder.stat(), 0o022)
        # Three times as fast as pathlib, every second.
        with os.scandir(self._folder) as entries:
            state = [(entry.name, state_of(entry)) for entry in entries if entry.name.endswith(PUBLIC_SUFFIX)]
        if len(state) > MAX_KEYS:
            raise KeyFileError(f"{self._folder} has {len(state):,} keys; the limit is {MAX_KEYS:,}")
        return sorted(state, key=itemgetter(0))

    def _read_again(self) -> None:
        state = self._found()
        if state == self._state and not self._has_unread:
            return
        is_changed, self._state, self._has_unread = state != self._state, state, False
        before, problems = self.names, set[str]()
        names, keys = dict[str, str](), {name: key for key, name in before.items()}
        for file, *_ in state:
            path, name = self._folder / file, file.removesuffix(PUBLIC_SUFFIX)
            try:
                if not NAME.fullmatch(name):
                    raise KeyFileError(f"{path} is not named like a worker")
                names[read_key(path, is_secret=False).decode("ascii")] = name
            except UnreadKeyError as error:
                self._has_unread, known = True, name in keys
                problems.add(f"{error}; {'its key of before stays in force' if known else 'it admits no worker'}")
                if known:
                    names[keys[name]] = name
            except KeyFileError as error:
                problems.add(f"{error}; it admits no worker")
        for problem in sorted(problems if is_changed else problems - self._problems):
            log.warning("workers_keys: %s", problem)
        self.names, self._problems = names, problems
        removed = sorted(name for key, name in before.items() if key not in names)
        if removed:
            log.warning("workers_keys: the keys of %s are no longer admitted", _listed(removed))
        if is_changed or names != before:
            log.info("workers_keys: %s of other hosts may join", numbered(len(names), "worker"))


def _reason(folder: Path, error: OSError | KeyFileError) -> str:
    if isinstance(error, KeyFileError):
        return str(error)
    return f"{os.fspath(error.filename or folder)} cannot be read: {error.strerror}"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {numbered(len(names) - 8, 'other')}" if len(names) > 8 else shown


class KeyCheck:
    """A thread that serves until the context ends. Without it libzmq would admit every key."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", admitted: AdmittedKeys) -> None:
        """Begins. Make it before a connection can come."""
        self._admitted = admitted
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        self._named = set[str]()
        self._num_others = 0
        self._read_at, self._report_at = 0.0, time.monotonic() + _REPORT_SECONDS
        NeededThread(target=self._serve, name="key check").start()

    def _serve(self) -> None:
        try:
            while True:
                if self._socket.poll(int(_POLL_SECONDS * 1e3)):
                    self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
                now = time.monotonic()
                if now >= self._read_at:
                    self._read_at = now + _POLL_SECONDS
                    self._admitted.poll()
                    self._report(now)
        except zmq.ContextTerminated:
            self._socket.close(0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Returns the reply of RFC 27; the user id of an admitted connection is its key."""
        _, request_id, _, address, _, mechanism, *credentials = request
        key = ""
        if mechanism == b"CURVE" and len(credentials) == 1:
            key = zmq.utils.z85.encode(credentials[0]).decode("ascii")
        if key in self._admitted.names:
            return [_VERSION, request_id, b"200", b"OK", key.encode("ascii"), b""]
        self._refused(key, address.decode("latin-1"))
        return [_VERSION, request_id, b"400", b"this key is not admitted", b"", b""]

    def _refused(self, key: str, address: str) -> None:
        if key in self._named or len(self._named) == _MAX_NAMED:
            self._num_others += 1
            return
        self._named.add(key)
        log.warning(
            "refused a worker at %s: its public key %s is not in the folder of admitted keys", address[:64], key
        )

    def _report(self, now: float) -> None:
        """Logs every ten seconds how many more connections were refused."""
        if now < self._report_at:
            return
        self._report_at = now + _REPORT_SECONDS
        if self._num_others:
            log.warning("refused %s of workers in %g s", numbered(self._num_others, "more connection"), _REPORT_SECONDS)
        self._named.clear()
        self._num_others = 0


def listener_of(endpoint: str, folder: Path | None) -> "RemoteListener | None":
    """Returns the listener of the settings workers_listen and workers_keys, None without one. Raises SettingError."""
    if not endpoint and folder is not None:
        raise SettingError(f"workers_keys is {folder} and workers_listen is not set; set it to tcp://HOST:PORT too")
    return RemoteListener(endpoint, folder) if endpoint else None


class RemoteListener:
    """The checked settings and the context of the socket. Call `start`, then bind with `configure`."""

    def __init__(self, endpoint: str, folder: Path | None) -> None:
        """Raises SettingError if the address is malformed, or keys are missing or cannot be trusted."""
        matched = _ADDRESS.fullmatch(endpoint)
        if matched is None or int(matched["port"]) > 65_535:
            raise SettingError(
                f"workers_listen is {endpoint}; it must be tcp://HOST:PORT with a port from 0 to 65535, like "
                "tcp://0.0.0.0:50060"
            )
        if folder is None:
            raise SettingError(
                f"workers_listen is {endpoint} and workers_keys is not set; over TCP workers need keys: {HOW_TO_MAKE}"
            )
        self.endpoint = endpoint
        self._secret = scheduler_secret(folder)
        self.admitted = AdmittedKeys(folder / ADMITTED)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def start(self) -> None:
        """Reads the admitted keys and starts their check. Call it before the socket is bound."""
        self.admitted.poll()
        KeyCheck(self.context, self.admitted)

    def configure(self, socket: "zmq.Socket[bytes]") -> None:
        """Sets the options of the socket before it is bound."""
        if "[" in self.endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"workers")
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)


def as_guest(join: "worker_pb2.Join", worker: str) -> None:
    """Removes the process id, the shared pool and the key from the Join.

    A process with that id on this host is another one, so it is neither killed nor drained by its number. Memory that
    outlives the worker can be taken over on its own host only, and the core does not know which workers share a host.
    """
    if join.pool_id:
        log.warning("worker %s shares its KV pool; that is not used, because it runs on another host", worker)
    for field in ("pid", "pool_id", "pool_layout", "pool_bytes", "key"):
        join.ClearField(field)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0, 1 if the keys cannot be made; exits with 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="tandem keys",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of the keys, mode 0700; made if missing")
    parser.add_argument("names", metavar="NAME", nargs="*", help="names of workers (default: worker)")
    args = parser.parse_args(arguments)
    folder, names = args.folder.absolute(), list(dict.fromkeys(args.names)) or ["worker"]
    try:
        make(folder, names)
    except KeyFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"scheduler: --workers-keys {folder}  ({SCHEDULER_SECRET} stays on its host)")
    for name in names:
        print(f"worker {name}: move {folder / WORKERS / name} to its host, and start it with --keys FOLDER")
    print(f"to shut a worker out: remove {folder / ADMITTED}/NAME{PUBLIC_SUFFIX}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
