"""The addresses of several cells, and what a client needs to enter them: the same for all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import grpc
import grpc.aio

from tandem_client.cells.async_channel import AsyncCellsChannel
from tandem_client.cells.sync_channel import CellsChannel
from tandem_client.credentials import Access, Metadata, TlsSettings

# A host that vanished answers nothing; the others must not wait for it for as long as a client of one service does.
_CONNECT_TIMEOUT_MS = 3_000
MAX_CELLS = 256


@dataclass(frozen=True, slots=True, repr=False)
class CellsAccess:
    """The access to several cells; stands for an `Access`."""

    cells: tuple[Access, ...]

    @property
    def address(self) -> str:
        """All addresses, for people."""
        return ", ".join(self._addresses)

    @property
    def metadata(self) -> Metadata | None:
        """The metadata of each call."""
        return self.cells[0].metadata

    @property
    def _addresses(self) -> tuple[str, ...]:
        return tuple(cell.address for cell in self.cells)

    def channel(self) -> grpc.Channel:
        """Makes the channel of a blocking client. Raises OSError, ValueError for files of TLS."""
        return cast(grpc.Channel, CellsChannel(self._addresses, [cell.channel() for cell in self.cells]))

    def aio_channel(self) -> grpc.aio.Channel:
        """Makes the channel of an asynchronous client. Raises OSError, ValueError for files of TLS."""
        return cast(grpc.aio.Channel, AsyncCellsChannel(self._addresses, [cell.aio_channel() for cell in self.cells]))


def access_of(address: str | Sequence[str], token: str | None, tls: TlsSettings | None) -> Access | CellsAccess:
    """The access to one service, or to several cells. Raises ValueError."""
    if isinstance(address, str):
        return Access(address=address, token=token, tls=tls)
    addresses = list(address)
    if not 0 < len(addresses) <= MAX_CELLS:
        raise ValueError(f"address has {len(addresses)} addresses; there must be 1 to {MAX_CELLS}")
    if repeated := [each for place, each in enumerate(addresses) if each in addresses[:place]]:
        raise ValueError(f"address has {repeated[0]} twice; each cell has an address of its own")
    if len(addresses) == 1:
        return Access(address=addresses[0], token=token, tls=tls)
    return CellsAccess(
        tuple(Access(address=each, token=token, tls=tls, connect_timeout_ms=_CONNECT_TIMEOUT_MS) for each in addresses)
    )
