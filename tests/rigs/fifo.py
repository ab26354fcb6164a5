"""A FIFO in which programs say something to a test."""

import os
from pathlib import Path
from typing import Self

from tests.rigs.waiting import until


class Fifo:
    """Makes the FIFO and opens it. What comes is awaited as long as `until` waits: a program that ends too early would
    let an ordinary reader wait for ever."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._text, self._was_written = "", False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reader)

    def read(self, length: int) -> str:
        """So many characters."""
        until(lambda: self._take() or len(self._text) >= length, f"{length} characters in {self.path}")
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def read_to_end(self) -> str:
        """What is left when all programs that wrote have closed it. Others may write after that."""
        until(self._take, f"the end of {self.path}")
        taken, self._text, self._was_written = self._text, "", False
        return taken

    def _take(self) -> bool:
        """Takes what there is. Returns whether it is the end."""
        try:
            piece = os.read(self._reader, 1 << 16)
        except BlockingIOError:
            return False
        self._text += piece.decode()
        self._was_written |= bool(piece)
        return self._was_written and not piece
