"""Answers libzmq whether the key of a connection is admitted (ZAP, RFC 27), in a thread of its own.

Owns the thread and its socket. It also reads the folder of keys again each second, so that neither costs the loop any
time. Of the keys that are refused, a bounded number is logged.
"""

import logging
import threading
import time

import zmq
import zmq.utils.z85

from scheduler_svc.remote.admitted import AdmittedKeys

log = logging.getLogger("tandem.core")

_ENDPOINT = "inproc://zeromq.zap.01"
_POLL_SECONDS, _REPORT_SECONDS = 1.0, 10.0
# Keys named in the log between two reports; others are counted.
_MAX_NAMED = 8
_VERSION = b"1.0"


class KeyCheck:
    """Serves until the context ends. Without it libzmq would admit every key."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", admitted: AdmittedKeys) -> None:
        """Binds the socket; `start` it before a connection can come."""
        self._admitted = admitted
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        self._named = set[str]()
        self._num_others = 0
        self._read_at, self._report_at = 0.0, time.monotonic() + _REPORT_SECONDS
        self._thread = threading.Thread(target=self._serve, name="key check", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

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
            log.warning("refused %d more connections of workers in %g s", self._num_others, _REPORT_SECONDS)
        self._named.clear()
        self._num_others = 0
