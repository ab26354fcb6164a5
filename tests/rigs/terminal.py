"""A program on a terminal of its own: a pty, with a test at its other side that reads and types.

The program is a session leader, so that a typed Ctrl-C interrupts it as it would a person's program.
"""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pexpect
from pexpect import fdpexpect

from tests.rigs.preloaded import Popen
from tests.rigs.processes import server_of
from tests.rigs.waiting import TIMEOUT_SECONDS

CTRL_C, CTRL_D, ENTER, ALT_ENTER, UP, TAB = "\x03", "\x04", "\r", "\x1b\r", "\x1b[A", "\t"
# Makes standard input the session's terminal, and becomes the command. Not in a `preexec_fn`, for which Python forks:
# a test with a gRPC server has threads that do not survive that.
_TAKE_TERMINAL = """\
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """Starts the program; leaving it kills the program."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        rows: int = 24,
        columns: int = 80,
        folder: Path | None = None,
    ) -> None:
        self._master, inner = pty.openpty()
        self.resize(rows, columns)
        options: dict[str, Any] = {**dict.fromkeys(("stdin", "stdout", "stderr"), inner), "env": env, "text": True}
        options["cwd"] = folder
        server = server_of(command[2:], env) if command[:2] == [sys.executable, "-m"] else None
        if server is not None:
            self.program = Popen(server, command, start_new_session=True, **options)
        else:
            take = [sys.executable, "-P", "-S", "-c", _TAKE_TERMINAL]
            self.program = subprocess.Popen([*take, *command], start_new_session=True, **options)
        os.close(inner)
        self._reader = fdpexpect.fdspawn(self._master, timeout=TIMEOUT_SECONDS, encoding="utf-8")
        # All that was read.
        self.seen = ""

    def resize(self, rows: int, columns: int) -> None:
        """Changes the size; the program gets SIGWINCH."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, pattern: str) -> str:
        """Reads until a pattern comes; returns what came before it, and the match."""
        try:
            self._reader.expect(pattern)
        except (pexpect.EOF, pexpect.TIMEOUT) as error:
            shown = self.seen + str(self._reader.before)
            code = self.program.poll()
            raise AssertionError(
                f"{pattern!r} did not come ({type(error).__name__}, exit code {code}): {shown!r}"
            ) from None
        read = str(self._reader.before) + str(self._reader.after)
        self.seen += read
        return read

    def expect_end(self) -> int:
        """Waits for the program's end; returns its exit code."""
        code = self.program.wait(TIMEOUT_SECONDS)
        try:
            while piece := os.read(self._master, 65536):
                self.seen += piece.decode(errors="replace")
        except OSError:
            # Linux reports the closed other side so.
            pass
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.program.poll() is None:
            self.program.kill()
        self.program.wait()
        self._reader.close()
