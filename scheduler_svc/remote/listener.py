"""The address at which workers of other hosts connect: the check of its setting, and the options of its socket.

Owns the context of that socket, so that encryption and connections of strangers have an I/O thread of their own.
"""

import re
from pathlib import Path

import zmq

from scheduler_svc.remote.admitted import AdmittedKeys
from scheduler_svc.remote.key_check import KeyCheck
from scheduler_svc.remote.key_files import ADMITTED, HOW_TO_MAKE, scheduler_keys
from tandem_contract.curve_keys import HANDSHAKE_MS, HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from tandem_contract.settings import SettingError

_ADDRESS = re.compile(r"tcp://(?P<host>[^\s:/]+|\*|\[[0-9A-Fa-f:.%]+\]):(?P<port>\d{1,5})")


def listener_of(endpoint: str, folder: Path | None) -> "RemoteListener | None":
    """Returns the listener of the settings workers_listen and workers_keys, None without one. Raises SettingError."""
    if endpoint:
        return RemoteListener(endpoint, folder)
    if folder is not None:
        raise SettingError(f"workers_keys is {folder} and workers_listen is not set; set it to tcp://HOST:PORT too")
    return None


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
        self._secret = scheduler_keys(folder)[1]
        self.admitted = AdmittedKeys(folder / ADMITTED)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def start(self) -> None:
        """Reads the admitted keys and starts their check. Call it before the socket is bound."""
        self.admitted.poll()
        KeyCheck(self.context, self.admitted).start()

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
