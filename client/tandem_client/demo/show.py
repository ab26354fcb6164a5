"""The demo's output: timed lines, the streams as they grow, the closing table.

Owns the terminal. On a terminal the streams are shown live; otherwise each stream is one line when it has ended.
"""

import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tandem_client.demo.prompts import Question
from tandem_client.demo.rounds import Completion, Round
from tandem_client.types import Delta

_FRAMES_PER_SECOND = 12
_TAIL_CHARACTERS = 100
_WIDTH_WITHOUT_TERMINAL = 140
_COMPLETION_WIDTH = 70


def make_console() -> Console:
    """Returns the terminal, or without one a console that is wide enough for the table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)


class Teller:
    """Prints lines with the seconds since the demo began and the name of the speaker."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._began

    def say(self, speaker: str, message: str) -> None:
        """Prints one line."""
        style = "bold" if speaker == "demo" else "dim"
        line = Text(f"{self.seconds:7.2f} s  {speaker:<9}  {message}", style=style)
        self.console.print(line, soft_wrap=True)


class Board:
    """The streams of one round, side by side."""

    def __init__(self, teller: Teller, asked: Sequence[Question]) -> None:
        self._teller = teller
        self._asked = asked
        self._texts = [""] * len(asked)
        self._num_tokens = [0] * len(asked)
        self._ended = [""] * len(asked)
        self._live: Live | None = None
        if teller.console.is_terminal:
            self._live = Live(
                console=teller.console,
                get_renderable=self._table,
                refresh_per_second=_FRAMES_PER_SECOND,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def on_delta(self, index: int, delta: Delta) -> None:
        """Adds a delta to a stream."""
        self._texts[index] += delta.text
        self._num_tokens[index] += len(delta.token_ids)

    def on_done(self, index: int, completion: Completion) -> None:
        """Notes the end of a stream."""
        self._ended[index] = completion.ended_by
        if self._live is None:
            what = f"{index + 1} of {len(self._asked)}: {len(completion.token_ids)} tokens, {completion.ended_by}"
            self._teller.say("stream", what)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, expand=True)
        table.add_column("tokens", justify="right", width=6)
        table.add_column("text", ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column("ended by", width=8)
        for question, text, num_tokens, ended in zip(
            self._asked, self._texts, self._num_tokens, self._ended, strict=True
        ):
            grown = Text(question.prompt, style="bold")
            grown.append(one_line(text)[-_TAIL_CHARACTERS:], style="not bold")
            table.add_row(str(num_tokens), grown, ended)
        return table


def one_line(text: str) -> str:
    """Returns the text with single blanks in place of line breaks and runs of blanks."""
    blank = " " if text[:1].isspace() else ""
    return blank + " ".join(text.split())


def round_line(name: str, result: Round) -> str:
    """Returns the measurements of a round as one line."""
    firsts = sorted(completion.first_token_seconds for completion in result.completions)
    return (
        f"{name}: {len(result.completions)} completions, {result.num_tokens} tokens in {result.seconds:.2f} s "
        f"({result.num_tokens / result.seconds:.0f} tokens/s), first token after {firsts[len(firsts) // 2]:.3f} s "
        f"(median), {result.steps} steps, at most {result.pages_used} of {result.pages_total} pages used"
    )


def result_table(undisturbed: Round, disturbed: Round, differing: Sequence[int]) -> Table:
    """Returns one row per prompt: the completion, its undisturbed speed, and the kills of the second round."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("tokens", "first token", "tokens/s", "kills survived", "recomputed", "equal"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    table.add_column("completion", no_wrap=True, overflow="ellipsis", max_width=_COMPLETION_WIDTH)
    pairs = zip(undisturbed.completions, disturbed.completions, strict=True)
    for index, (one, other) in enumerate(pairs):
        table.add_row(
            str(len(one.token_ids)),
            f"{one.first_token_seconds:.3f} s",
            f"{one.tokens_per_second:.0f}",
            str(other.summary.timing.worker_changes),
            str(other.summary.usage.recomputed_tokens),
            "NO" if index in differing else "yes",
            Text(one_line(other.prompt + other.text)),
        )
    return table
