"""The files of a server's certificate: what is in it, and that they are used again when they have changed."""

import ipaddress
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem_contract.files import FileState, state_of

# A handshake has two round trips, and a third one with client certificates.
_MAX_TURNS = 4


class Followed:
    """Some files, and what is done with them. Files that cannot be used are reported once, and change nothing."""

    def __init__(
        self,
        paths: Iterable[Path | None],
        use: Callable[[], object],
        log: logging.Logger,
        *,
        whose: str = "",
        pause_seconds: float = 0.0,
    ) -> None:
        """`use` reads the files. It raises OSError (SSLError too) or ValueError, and changes nothing then.

        The lines of the log begin with `whose`. Between two looks are at least `pause_seconds`.
        """
        self._paths = [path for path in paths if path is not None]
        self._use, self._log, self._whose, self._pause_seconds = use, log, whose, pause_seconds
        self._lock = threading.Lock()
        self._state, self._look_at = state_of(*self._paths), time.monotonic() + pause_seconds
        self._failure: tuple[FileState | None, str] | None = None

    def look(self) -> bool:
        """Uses the files again if they have changed; returns whether it did. For any thread: one at a time looks."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            now = time.monotonic()
            return now >= self._look_at and self._look(now)
        finally:
            self._lock.release()

    def _look(self, now: float) -> bool:
        self._look_at = now + self._pause_seconds
        state = state_of(*self._paths)
        if state is not None and state == self._state:
            return False
        names = self._whose + ", ".join(map(str, self._paths))
        try:
            self._use()
        except (OSError, ValueError) as error:
            # The next look tries again, because the cause may be none of the files.
            self._state = None
            if (failure := (state, str(error))) != self._failure:
                self._failure = failure
                self._log.error("%s cannot be used: %s; what was read before stays in force", names, error)
            return False
        self._state, self._failure = state, None
        self._log.info("%s was read again", names)
        return True


def shortest(host: str) -> str:
    """The host without brackets; of an address the one form in which two are compared: OpenSSL writes ::1 in full."""
    bare = host.strip().strip("[]")
    with suppress(ValueError):
        return str(ipaddress.ip_address(bare))
    return bare


def own_certificate(certificate: Path, key: Path) -> dict[str, Any]:
    """The certificate as the ssl module gives it, from a handshake with itself; empty if the files cannot be used."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        # An encrypted key would make OpenSSL ask the terminal.
        server.load_cert_chain(certificate, key, password="")
        client.load_verify_locations(certificate)
        ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
        for _ in range(_MAX_TURNS):
            for end in ends:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        return ends[0].getpeercert() or {}
    except (OSError, ValueError):
        # For example, the certificate has expired. The server that uses it names what is wrong.
        return {}
