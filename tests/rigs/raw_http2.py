"""One connection that writes HTTP/2 frames (RFC 9113) itself. Knows nothing of the methods.

A gRPC library obeys the protocol, and takes 200 us of CPU for a message. This caller can open calls without sending
their message, or only a part of it, and accept no answers; and it takes 10 us, so that beside a service on the same
cores it measures the service.
"""

import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_CANCEL = 8
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4
_FIRST_WINDOW, _LARGEST_WINDOW, _FRAME_BYTES = 65_535, (1 << 31) - 1, 16_384
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def ends_stream(self) -> bool:
        return self.kind == RST_STREAM or (self.kind in (DATA, HEADERS) and bool(self.flags & _END_STREAM))


class RawConnection:
    """`window`: the answer bytes that the server may send on each stream; with 0 it can send a status only.

    On the whole connection it may send 64 KiB, or 2 GiB if `window` is larger than that.
    `source`: the address that the connection comes from. This host has all addresses from 127.0.0.1 to 127.255.255.254.
    """

    def __init__(self, address: str, *, window: int = 0, source: str = "", timeout: float = 10.0) -> None:
        host, _, port = address.rpartition(":")
        own = (source, 0) if source else None
        self._socket = socket.create_connection((host, int(port)), timeout=timeout, source_address=own)
        self._last_stream = -1
        self._received = b""
        # What `frames` has read and not yielded yet.
        self._unread: deque[Frame] = deque()
        # What the server allows to send: on each new stream, on each stream, and on the connection (stream 0).
        self._first_window = _FIRST_WINDOW
        self._windows: dict[int, int] = {0: _FIRST_WINDOW}
        # Without a table, a block of headers can be read without those before it.
        settings = struct.pack(">HIHI", _HEADER_TABLE_SIZE, 0, _INITIAL_WINDOW_SIZE, window)
        self._socket.sendall(_PREFACE + _frame(SETTINGS, 0, 0, settings))
        if window > _FIRST_WINDOW:
            self._socket.sendall(_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", _LARGEST_WINDOW - _FIRST_WINDOW)))

    def call(self, method: str, message: bytes | None, token: str = "") -> int:
        """Opens a call; without a message it sends only the headers. Returns the stream's number."""
        self._last_stream += 2
        frames = _frame(HEADERS, _END_HEADERS, self._last_stream, _headers(method, token))
        if message is not None:
            body = struct.pack(">BI", 0, len(message)) + message
            parts = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
            for part in parts:
                flags = _END_STREAM if part is parts[-1] else 0
                frames += _frame(DATA, flags, self._last_stream, part)
        self._socket.sendall(frames)
        return self._last_stream

    def reset(self, stream: int) -> None:
        self._socket.sendall(_frame(RST_STREAM, 0, stream, struct.pack(">I", _CANCEL)))

    def reset_calls(self, method: str, count: int) -> None:
        """Opens calls and resets each at once, all in one write."""
        block, frames = _headers(method), bytearray()
        for _ in range(count):
            self._last_stream += 2
            frames += _frame(HEADERS, _END_HEADERS, self._last_stream, block)
            frames += _frame(RST_STREAM, 0, self._last_stream, struct.pack(">I", _CANCEL))
        self._socket.sendall(frames)

    def ping(self) -> None:
        self._socket.sendall(_frame(PING, 0, 0, bytes(8)))

    def skip(self) -> None:
        """Drops what the server has sent so far. Raises ConnectionResetError if it has closed the connection."""
        self._socket.setblocking(False)
        try:
            while self._socket.recv(1 << 16):
                pass
        except BlockingIOError:
            return
        finally:
            self._socket.settimeout(10)
        raise ConnectionResetError("the server closed the connection")

    def stall(self, streams: Sequence[int], num_bytes: int, *, quiet_seconds: float = 1.0) -> int:
        """Sends `num_bytes` of a message of one byte more on each stream, as far as the server's windows allow.

        Returns the bytes that the server let in when it has allowed no more for `quiet_seconds`. Streams that the
        server ends get no more.
        """
        prefix = struct.pack(">BI", 0, num_bytes + 1)
        left, num_sent = dict.fromkeys(streams, num_bytes), 0
        for stream in streams:
            self._windows.setdefault(stream, self._first_window)
            self._socket.sendall(_frame(DATA, 0, stream, prefix))
            self._take_windows(stream, len(prefix))
        self._socket.settimeout(quiet_seconds)
        try:
            frames = self.frames()
            while left:
                for stream in list(left):
                    while size := min(left[stream], _FRAME_BYTES, self._windows[stream], self._windows[0]):
                        if size < 0:
                            break
                        self._socket.sendall(_frame(DATA, 0, stream, bytes(size)))
                        self._take_windows(stream, size)
                        left[stream] -= size
                        num_sent += size
                    if not left[stream]:
                        del left[stream]
                frame = next(frames, None)
                if frame is None:
                    break
                if frame.ends_stream:
                    left.pop(frame.stream, None)
        except TimeoutError:
            pass
        finally:
            self._socket.settimeout(10)
        return num_sent

    def frames(self, *, answering: bool = True) -> Iterator[Frame]:
        """The frames until the server closes the connection. Times out after 10 s.

        With `answering` it answers settings and pings.
        """
        while True:
            # A caller that stops here finds the others later.
            while self._unread:
                yield self._unread.popleft()
            try:
                self._unread.extend(self.arrived(answering=answering))
            except ConnectionResetError:
                return

    def arrived(self, *, answering: bool = True) -> list[Frame]:
        """Reads once, waiting until there is something to read. Returns the frames that are whole.

        With `answering` it answers settings and pings. Raises ConnectionResetError if the server closed the connection.
        """
        more = self._socket.recv(1 << 16)
        if not more:
            raise ConnectionResetError("the server closed the connection")
        self._received += more
        frames, at = list[Frame](), 0
        while len(self._received) >= at + 9:
            size = int.from_bytes(self._received[at : at + 3], "big")
            if len(self._received) < at + 9 + size:
                break
            kind, flags, stream = struct.unpack_from(">BBI", self._received, at + 3)
            at += 9 + size
            frames.append(Frame(kind=kind, flags=flags, stream=stream, payload=self._received[at - size : at]))
        self._received = self._received[at:]
        for frame in frames:
            if answering and frame.kind in (SETTINGS, PING) and not frame.flags & _ACK:
                self._socket.sendall(_frame(frame.kind, _ACK, 0, frame.payload if frame.kind == PING else b""))
            self._read_windows(frame)
        return frames

    def fileno(self) -> int:
        return self._socket.fileno()

    def wait_ends(self, count: int) -> list[Frame]:
        """Waits until `count` streams have ended. Returns the frames that ended them."""
        ended: dict[int, Frame] = {}
        for frame in self.frames():
            if frame.ends_stream:
                ended.setdefault(frame.stream, frame)
            if len(ended) == count:
                return list(ended.values())
        raise AssertionError(f"the server closed the connection after {len(ended)} of {count} calls had ended")

    def close(self) -> None:
        self._socket.close()

    def _take_windows(self, stream: int, size: int) -> None:
        self._windows[stream] -= size
        self._windows[0] -= size

    def _read_windows(self, frame: Frame) -> None:
        if frame.kind == WINDOW_UPDATE:
            added = int.from_bytes(frame.payload, "big")
            self._windows[frame.stream] = self._windows.get(frame.stream, self._first_window) + added
        elif frame.kind == SETTINGS and not frame.flags & _ACK:
            for at in range(0, len(frame.payload), 6):
                name, value = struct.unpack(">HI", frame.payload[at : at + 6])
                if name == _INITIAL_WINDOW_SIZE:
                    for stream in self._windows.keys() - {0}:
                        self._windows[stream] += value - self._first_window
                    self._first_window = value


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _headers(method: str, token: str = "") -> bytes:
    """The header block of a call."""
    headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x", "te": "trailers"}
    headers["content-type"] = "application/grpc"
    if token:
        headers["authorization"] = f"Bearer {token}"
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in headers.items())


def _string(text: str) -> bytes:
    """A string in HPACK (RFC 7541) without Huffman coding. A zero byte before name and value marks a literal field."""
    data = text.encode()
    assert len(data) < 127
    return bytes([len(data)]) + data


def fields(block: bytes) -> dict[str, str]:
    """The named fields of a block of headers from gRPC; it numbers the others, such as `:status`.

    gRPC writes names, and text that is not the value of a `-bin` field, without Huffman coding.
    """
    found, at = dict[str, str](), 0
    while at < len(block):
        at += 1
        # Neither the number of a field nor a new size of the table.
        if block[at - 1] in (_LITERAL, _INDEXED_LITERAL):
            name, at = _read_string(block, at)
            value, at = _read_string(block, at)
            found[name.decode()] = value.decode("latin-1")
    return found


_LITERAL, _INDEXED_LITERAL = 0x00, 0x40


def _read_string(block: bytes, at: int) -> tuple[bytes, int]:
    """The string at this place, as it stands, and the place after it."""
    size = block[at] & 127
    at += 1
    if size == 127:
        shift = 0
        while True:
            size += (block[at] & 127) << shift
            shift += 7
            at += 1
            if block[at - 1] < 128:
                break
    return block[at : at + size], at + size
