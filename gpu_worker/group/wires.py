"""The sockets between the leader and the other ranks, and their names: ipc within a host, TCP with CURVE between hosts.

Owns their context, their addresses and the check of keys. All hosts of a group have the same key pair, that of the
worker that they are together: the leader serves with it, and admits it alone. What the ranks say in clear text over
torch.distributed before that is a port and hashes.
"""

import hashlib
import logging
import os
import socket
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
import zmq.auth.thread

from gpu_worker.link.connection import MAX_FRAME_BYTES, CurveKeys
from gpu_worker.process.ranks import Ranks
from tandem_contract.files import check_socket_name
from tandem_contract.logs import is_worth_a_line
from tandem_contract.plural import numbered
from tandem_contract.settings import SettingError

if TYPE_CHECKING:
    from gpu_worker.group.start import Together

log = logging.getLogger(__name__)

# A message of the leader is its kind and, for `FRAME`, the bytes that it got from the scheduler.
FRAME, HELLO, STOP = b"frame", b"hello", b"stop"
# The sockets between two ranks.
PURPOSES = ("frames", "signs")
# There are at most two plans in flight; a longer queue means that the rank is gone.
HIGH_WATER_MARK = 64
_LEADER_VARIABLE = "MASTER_ADDR"
# A hash of this many bytes is a whole number of a tensor.
_HASH_BYTES = 6
_MAX_FROM_FOLLOWERS = 4096
# The name under which the keys of these sockets are checked (ZAP).
_DOMAIN = "group"


class Wires:
    """`frames` and `signs`: the leader's end of each is a ROUTER, that of another rank a DEALER."""

    def __init__(
        self,
        ranks: Ranks,
        together: "Together",
        runtime_dir: Path,
        group: str,
        *,
        identity: str = "",
        keys: CurveKeys | None = None,
    ) -> None:
        """identity: of the model. keys: of this host, if the group is on several.

        Returns when all ranks of such a group are here. Raises SettingError if its hosts differ in key or model.
        """
        assert keys is not None or not ranks.spans_hosts, "check_keys has refused this"
        self._ranks, self._runtime_dir, self._group = ranks, runtime_dir, group
        self._keys = keys if ranks.spans_hosts else None
        if self._keys is not None:
            _check_equal(together, self._keys, identity)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._key_check: zmq.auth.thread.ThreadAuthenticator | None = None
        ports = dict.fromkeys(PURPOSES, 0)
        sockets = dict[str, zmq.Socket[bytes]]()
        if ranks.is_leader:
            if self._keys is not None:
                self._num_refused = 0
                self._key_check = zmq.auth.thread.ThreadAuthenticator(self._context)
                self._key_check.start()
                self._key_check.configure_curve_callback(_DOMAIN, self)
            for purpose in PURPOSES:
                sockets[purpose], ports[purpose] = self._bound(purpose)
        if self._keys is not None:
            ports = {purpose: int(together.of_leader(port)) for purpose, port in ports.items()}
        if not ranks.is_leader:
            sockets = {purpose: self._connected(purpose, port) for purpose, port in ports.items()}
        self.frames, self.signs = (sockets[purpose] for purpose in PURPOSES)

    def close(self) -> None:
        """Ends the context; both sockets must be closed."""
        if self._key_check is not None:
            self._key_check.stop()
        self._context.term()
        for purpose in PURPOSES if self._ranks.is_leader else ():
            self._path(purpose).unlink(missing_ok=True)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this public key (Z85) may connect; called by pyzmq's thread."""
        assert self._keys is not None, "only asked for keys"
        if key == self._keys.public:
            return True
        self._num_refused += 1
        if is_worth_a_line(self._num_refused):
            shown = key.decode("ascii", "replace")
            refused = numbered(self._num_refused, "connection to this group")
            log.warning("refused %s, the last with public key %s", refused, shown)
        return False

    def _bound(self, purpose: str) -> tuple[zmq.Socket[bytes], int]:
        """The leader's end, and its port for other hosts; 0 if there are none."""
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        router.setsockopt(zmq.MAXMSGSIZE, _MAX_FROM_FOLLOWERS)
        if self._ranks.local_size > 1:
            before = os.umask(0o177)
            try:
                check_socket_name(self._path(purpose))
                router.bind(f"ipc://{self._path(purpose)}")
            finally:
                os.umask(before)
        if self._keys is None:
            return router, 0
        # For what is bound from here on.
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        router.bind(f"tcp://{socket.gethostbyname(os.environ[_LEADER_VARIABLE])}:0")
        return router, int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def _connected(self, purpose: str, port: int) -> zmq.Socket[bytes]:
        """Another rank's end; the leader's may not be there yet."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, name_of(self._ranks.rank))
        dealer.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, 20)
        if self._ranks.shares_host(0):
            dealer.connect(f"ipc://{self._path(purpose)}")
            return dealer
        assert self._keys is not None, "the leader is on another host"
        # The leader is served with the same keys.
        replace(self._keys, scheduler=self._keys.public).configure(dealer)
        dealer.connect(f"tcp://{os.environ[_LEADER_VARIABLE]}:{port}")
        return dealer

    def _path(self, purpose: str) -> Path:
        # Not longer than the names for which `own_runtime_dir` has checked that the folder's is short enough.
        return self._runtime_dir / f"{zlib.crc32(os.fsencode(self._group + purpose)):08x}.sock"


def _check_equal(together: "Together", keys: CurveKeys, identity: str) -> None:
    """Raises SettingError, on all ranks, if the hosts have different keys or models."""
    marks = [_mark(keys.public), _mark(identity.encode())]
    least = together.least([*marks, *(-mark for mark in marks)])
    here = {"keys": keys.folder, "model": identity}
    for (setting, own), low, high in zip(here.items(), least[:2], least[2:], strict=True):
        if low != -high:
            raise SettingError(
                f"{setting}: the hosts of this group do not have the same one (here {own}); use the same folder on each"
            )


def _mark(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:_HASH_BYTES])


def name_of(rank: int) -> bytes:
    """A follower's routing id."""
    return b"rank-%d" % rank


def rank_of(name: bytes) -> int | None:
    digits = name.removeprefix(b"rank-")
    return int(digits) if digits.isdigit() else None
