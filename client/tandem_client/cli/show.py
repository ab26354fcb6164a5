"""Prints a stream: as text that grows, with tables of log probabilities and figures below it, or as JSON lines.

The first of several samples is printed as it streams; the others follow one after another. A terminal gets the text of
a model without control characters: a model that writes escape sequences could move the cursor, rename the window or
fill the clipboard of its user.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.text import Text
from tandem.v1 import inference_pb2

from tandem_client.async_client import AsyncGenerateStream
from tandem_client.cli.plain import plain
from tandem_client.rates import rate_of
from tandem_client.sync_client import GenerateStream
from tandem_client.types import Delta, Summary, TokenLogprob, Waiting
from tandem_contract.plural import counted, numbered


def closing_line(
    stream: GenerateStream | AsyncGenerateStream, first_seconds: float, first_tokens: int, decode_seconds: float
) -> str:
    """Returns tokens, reasons and rates, and the summary's figures of cache, preemptions and workers.

    `first_seconds`: the time to the first delta, with `first_tokens`, as the caller saw it; `decode_seconds`: from
    there to the last one.
    """
    ends = [sample.finished for sample in stream.samples if sample.finished is not None]
    num_tokens = sum(end.output_tokens for end in ends)
    rate = rate_of(num_tokens - first_tokens, decode_seconds)
    reasons = ", ".join(dict.fromkeys(end.reason for end in ends))
    then = "" if rate is None else f", then {rate:.1f} tokens/s"
    line = f"{counted(num_tokens, 'token')}, ended by {reasons}; first after {first_seconds:.3f} s{then}"
    return "; ".join([line, *(_events(stream.summary) if stream.summary is not None else ())])


def _events(summary: Summary) -> list[str]:
    usage, timing = summary.usage, summary.timing
    cached = f"{usage.cached_prompt_tokens} of {numbered(usage.prompt_tokens, 'prompt token')} cached"
    events = (
        (usage.reasoning_tokens, f"{counted(usage.reasoning_tokens, 'token')} of reasoning"),
        (usage.cached_prompt_tokens, cached),
        (timing.preemptions, counted(timing.preemptions, "preemption")),
        (timing.worker_changes, counted(timing.worker_changes, "worker change")),
    )
    return [words for number, words in events if number]


def print_json(stream: GenerateStream) -> None:
    """Prints one message per line, each as it arrives, with the protos' names of fields.
    Fields without presence are always included. The first line also has the service, if a proxy named it.
    """
    for message in stream.messages():
        values: dict[str, Any] = MessageToDict(
            message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        if message.HasField("accepted") and stream.service:
            values["service"] = stream.service
        print(json.dumps(values, ensure_ascii=False, sort_keys=True), flush=True)


def print_text(stream: GenerateStream, *, ids: bool, with_figures: bool = True, asked: int | None = None) -> None:
    """Prints the text or the token ids as they arrive, then log probabilities; on a terminal also a line of figures.

    `asked` is the maximum of new tokens that the request names; a lower one in force is shown before the text.
    """
    started = time.monotonic()
    samples = _Samples(stream, ids=ids)
    stream.on_waiting = samples.waits
    # When the first delta arrived, and how many tokens it had; when the last one did.
    first, first_tokens, last = None, 0, started
    try:
        for delta in stream:
            last = time.monotonic()
            if first is None:
                first, first_tokens = last, delta_tokens(delta)
                if told := lowered(stream, asked, "--max-new-tokens"):
                    print(told, file=sys.stderr, flush=True)
            samples.show(delta)
    finally:
        if first is not None:
            samples.end()
    for line in _tables(stream):
        print(line, flush=True)
    if with_figures and sys.stderr.isatty() and first is not None:
        line = closing_line(stream, first - started, first_tokens, last - first)
        Console(stderr=True, highlight=False).print(line, style="dim")


def lowered(stream: GenerateStream | AsyncGenerateStream, asked: int | None, name: str) -> str:
    """What is said if the service has cut the maximum to what the model's length leaves; empty if it has not.

    `asked`: the maximum of new tokens that the request names, `name` what set it.
    """
    accepted = stream.accepted
    if accepted is None or asked is None or asked <= accepted.max_new_tokens:
        return ""
    behind = f"behind a prompt of {counted(accepted.prompt_tokens, 'token')}"
    return f"{name} is {asked:,}; the model's length leaves {accepted.max_new_tokens:,} {behind}"


def delta_tokens(delta: Delta | inference_pb2.Delta) -> int:
    """The tokens of a delta; without their ids it counts as one."""
    return len(delta.token_ids) or 1


class _Samples:
    """Prints one sample as it grows. Deltas of later samples wait until it has ended."""

    def __init__(self, stream: GenerateStream, *, ids: bool) -> None:
        self._stream = stream
        self._ids = ids
        # The sample that is printed now, and whether some of it has been printed.
        self._idx = 0
        self._has_begun = False
        # On a terminal; and whether the last text there was reasoning.
        is_terminal = sys.stdout.isatty()
        self._console = Console(highlight=False, markup=False, emoji=False) if is_terminal else None
        self._is_reasoning = False

    def show(self, delta: Delta) -> None:
        """Prints the delta if its sample is the current one, or becomes it now."""
        is_shown = False
        while self._has_next() and self._stream.samples[self._idx].finished is not None:
            self._next()
            is_shown = delta.sample_idx == self._idx
        if delta.sample_idx != self._idx or is_shown:
            return
        if self._has_begun:
            ids = " ".join(map(str, delta.token_ids)) + " "
            self._print_piece(delta.reasoning, ids if self._ids else delta.text)
        else:
            self._begin()

    def waits(self, waiting: Waiting) -> None:
        """Prints why the answer makes no progress, on a line of its own beside the answer."""
        line = f"waiting: {plain(waiting.message)}"
        # Below the part of the answer on the same terminal.
        print(f"\n{line}" if self._has_begun and self._console is not None else line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Prints all that has arrived and is not printed yet, also if the stream failed."""
        while self._has_next():
            self._next()
        self._close()

    def _has_next(self) -> bool:
        return self._idx < len(self._stream.samples) - 1

    def _next(self) -> None:
        if not self._has_begun:
            self._begin()
        self._close()
        self._idx += 1
        self._begin()

    def _begin(self) -> None:
        """Prints the part of the sample that has been read."""
        self._has_begun = True
        if len(self._stream.samples) > 1:
            self._print(f"--- sample {self._idx} ---\n")
        sample = self._stream.samples[self._idx]
        ids = "".join(f"{token} " for token in sample.token_ids)
        self._print_piece(sample.reasoning, ids if self._ids else sample.text)

    def _print_piece(self, reasoning: str, text: str) -> None:
        """Prints reasoning on a terminal only, dimmed and above the text, so that other programs read the answer."""
        if reasoning and self._console is not None:
            self._is_reasoning = True
            self._console.print(Text(plain(reasoning), style="dim"), end="", soft_wrap=True)
        if text:
            self._print("\n\n" if self._is_reasoning else "")
            self._is_reasoning = False
            self._print(text if self._console is None else plain(text))

    def _close(self) -> None:
        """Ends the sample: a line for each tool call, as JSON."""
        calls = self._stream.samples[self._idx].tool_calls
        if not calls or self._stream.samples[self._idx].text or self._is_reasoning:
            self._print("\n")
        self._is_reasoning = False
        for call in calls:
            self._print(json.dumps(call.as_dict(), ensure_ascii=False) + "\n")

    def _print(self, text: str) -> None:
        print(text, end="", flush=True)


def _tables(stream: GenerateStream) -> Iterator[str]:
    if stream.prompt_info is not None:
        yield from _table("prompt", stream.prompt_info.start, (), stream.prompt_info.logprobs)
    for sample in stream.samples:
        if sample.logprobs:
            name = f"sample {sample.idx}" if len(stream.samples) > 1 else "output"
            yield from _table(name, 0, sample.token_ids, sample.logprobs)


def _table(name: str, start: int, token_ids: Sequence[int], logprobs: Iterable[TokenLogprob]) -> Iterator[str]:
    """Yields a line per token: position, id if known, log probability, and the most probable ids with theirs."""
    yield f"{name}: position, {'token, ' if token_ids else ''}logprob, most probable"
    for idx, entry in enumerate(logprobs):
        token = f"{token_ids[idx]:>8}" if token_ids else ""
        piece = "" if entry.piece is None else f"  {entry.piece.text!r}"
        texts = [repr(piece.text) for piece in entry.top_pieces] or [""] * len(entry.top)
        top = "".join(f"  {other}{text}={logprob:.3f}" for (other, logprob), text in zip(entry.top, texts, strict=True))
        yield f"{start + idx:>8}{token}{entry.logprob:>10.3f}{piece}{top}"
