"""The child that tries grammars: one packet in, one packet out, until the front end closes the socket."""

import os
import socket

from scheduler_svc.constraint_trial.frames import HELLO, MAX_ERROR_CHARS, MAX_PACKET, packed, unpacked
from scheduler_svc.constraint_trial.trial import Trial


def serve(connection: socket.socket, trial: Trial) -> None:
    """Returns when the front end has closed the socket."""
    connection.send(packed(HELLO, f"{os.getpid()} {trial.slowness}"))
    while packet := connection.recv(MAX_PACKET):
        number, grammar = unpacked(packet)
        connection.send(packed(number, trial.refusal(grammar)[:MAX_ERROR_CHARS]))
