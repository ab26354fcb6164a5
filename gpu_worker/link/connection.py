"""One connection to a scheduler: a DEALER, its limits, and the monitor that says when it begins and ends.

Owns both sockets. A connection that ended stays ended: libzmq never connects a DEALER again after a frame above
MAXMSGSIZE, so the link replaces this object, with a routing id of its own each time. Knows nothing of messages.
"""

import os
import secrets
import socket

import zmq
import zmq.utils.monitor

# Plans and results are a few per second to a few thousand; more waiting than this means a peer that is gone.
HIGH_WATER_MARK = 64
MAX_FRAME_BYTES = 64 << 20
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Connection:
    """Connects at once, and goes on trying while no scheduler is there."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, f"w-{os.getpid()}-{secrets.token_hex(4)}".encode())
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # Nothing is queued for a scheduler that is not there: a new one must not read what was meant for another.
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED_HANDSHAKES
        )
        # Polled in place of the monitor's socket, for which libzmq makes system calls of its own at every poll.
        self.monitor_fd = int(self.monitor.getsockopt(zmq.FD))
        # Whether a scheduler is there, and whether one was and went.
        self.is_open, self.has_ended = False, False
        self.socket.connect(endpoint)
        # The descriptor becomes readable only after one look at the monitor has found nothing.
        self.read_monitor()

    def read_monitor(self) -> None:
        """Takes in what the monitor has to say; costs little when that is nothing."""
        while True:
            try:
                event = zmq.utils.monitor.recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_open = True
            else:
                self.is_open, self.has_ended = False, True

    def poller(self, wake: socket.socket) -> zmq.Poller:
        """Wakes for frames, for what the monitor has to say, and for `wake`."""
        poller = zmq.Poller()
        for readable in (self.socket, self.monitor_fd, wake):
            poller.register(readable, zmq.POLLIN)
        return poller

    def send(self, frame: bytes) -> bool:
        """False where there is no scheduler, or one that does not read: the monitor or a Rejoin will say so."""
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, *, linger_ms: int) -> None:
        """Closes both sockets; frames not yet sent have `linger_ms`."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
