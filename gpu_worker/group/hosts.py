"""The hosts of a group: where their launchers meet, and the address at which the others reach this host.

Owns the reading of the settings nnodes, rdzv_endpoint, rdzv_id and local_addr. Addresses are IPv4. Imports no torch.
"""

import errno
import fcntl
import ipaddress
import os
import re
import socket
import struct
from dataclasses import dataclass

from gpu_worker.link.remote import HOW_TO_MAKE
from gpu_worker.process.ranks import RUN_PREFIX, Ranks
from gpu_worker.settings import WorkerSettings
from tandem_contract.settings import SettingError

# The run id of a group on several hosts; what follows is no process's number.
HOSTS_PREFIX = "hosts-"
_ENDPOINT = re.compile(r"(?P<host>[^\s:/\[\]]+):(?P<port>\d{1,5})")
# Linux: the IPv4 address of an interface; the length of struct ifreq, and where in it the address is.
_SIOCGIFADDR, _IFREQ_BYTES, _ADDRESS_AT = 0x8915, 256, slice(20, 24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the launchers of a group meet (torchrun calls it the rendezvous)."""

    num_hosts: int
    host: str
    port: int
    run_id: str
    # Of this host.
    address: str

    @property
    def endpoint(self) -> str:
        """HOST:PORT."""
        return f"{self.host}:{self.port}"

    def is_held_here(self) -> bool:
        """Whether this process can open the port of the meeting, because it is on its host. Raises OSError."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                    return False
                raise
        return True


def on_one_host() -> Meeting:
    """The meeting of one launcher with itself."""
    return Meeting(num_hosts=1, host="localhost", port=0, run_id=f"{RUN_PREFIX}{os.getpid()}", address="localhost")


def meeting_of(settings: WorkerSettings) -> Meeting:
    """The meeting that the settings describe. Raises SettingError."""
    if settings.nnodes == 1:
        return on_one_host()
    matched = _ENDPOINT.fullmatch(settings.rdzv_endpoint)
    if matched is None or not 0 < int(matched["port"]) < 1 << 16:
        raise SettingError(
            f"rdzv_endpoint is {settings.rdzv_endpoint}; it must be HOST:PORT with a name or an IPv4 address, and a "
            "port from 1 to 65535"
        )
    host, port = matched["host"], int(matched["port"])
    address = settings.local_addr or _address_towards(host, port)
    _check_address(address, host)
    return Meeting(
        num_hosts=settings.nnodes, host=host, port=port, run_id=f"{HOSTS_PREFIX}{settings.rdzv_id}", address=address
    )


def check_keys(settings: WorkerSettings, ranks: Ranks) -> None:
    """Raises SettingError for a rank without keys whose group is on several hosts."""
    if ranks.spans_hosts and settings.keys is None:
        raise SettingError(
            f"ranks is {ranks.size}, {ranks.local_size} of them on this host, and keys is not set; between hosts the "
            f"ranks need keys: set connect and keys, {HOW_TO_MAKE}"
        )


def _address_towards(host: str, port: int) -> str:
    """This host's address on the way to that one; nothing is sent. Raises SettingError."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SettingError(f"rdzv_endpoint is {host}:{port}; there is no way to it: {error.strerror}") from error


def _check_address(address: str, meeting_host: str) -> None:
    """Raises SettingError for an address at which other hosts cannot reach this one."""
    try:
        is_loopback = ipaddress.IPv4Address(address).is_loopback
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except ValueError:
        raise SettingError(f"local_addr is {address}; it must be an IPv4 address of this host") from None
    except OSError as error:
        raise SettingError(f"local_addr is {address}; this host does not have it: {error.strerror}") from error
    if is_loopback and meeting_host != "localhost" and not meeting_host.startswith("127."):
        raise SettingError(
            f"this host's name {meeting_host} means {address} here, which no other host reaches; set local_addr to an "
            "address that they reach, or use it in rdzv_endpoint"
        )


def interface_of(address: str) -> str:
    """The name of this host's network interface whose first address this is; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_IFREQ_BYTES}s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                # It has no IPv4 address.
                continue
            if socket.inet_ntoa(answer[_ADDRESS_AT]) == address:
                return name
    return ""
