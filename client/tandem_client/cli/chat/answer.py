"""One answer: reads its stream, draws it, and looks at the service while it is silent.

Owns the tasks of one answer, and what a waiting user sees. `Screen` decides how it looks.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.v1 import inference_pb2

from tandem_client import errors
from tandem_client.async_client import AsyncClient, AsyncGenerateStream
from tandem_client.cli.chat.screen import Kind, Screen
from tandem_client.cli.show import closing_line, delta_tokens, lowered
from tandem_client.types import Load, ToolCall
from tandem_contract.plural import counted

# A shorter pause is not worth a word.
QUIET_SECONDS = 1.0
# Between the service's clock and this one: GetLoad's answer is on its way for a moment.
_ROUNDING_SECONDS = 0.3

# The pause between two drawings, and the largest share of the time that drawing may take.
_DRAW_SECONDS = 0.08
_DRAW_SHARE = 0.2
# Silence after which GetLoad is asked, the pause before it is asked again, and the time that it has.
_LOOK_SECONDS = 0.5
_LOAD_SECONDS = 2.0
_WORKER_LOST = "worker lost"


class Silence:
    """The time since the answer's last part, and what is known of its cause. Times are seconds of one clock."""

    def __init__(self, now: float) -> None:
        self.last = now
        # Parts of the answer that have come, and when the first one came.
        self.num_parts = 0
        self.first: float | None = None
        self.first_tokens = 0
        self.requests_ahead = 0
        # Since the last part: the service's own words, the cause in words, and what was lost if that explains it.
        self._reason = self._cause = self._lost = ""

    def waits(self, message: str, *, is_loss: bool) -> None:
        """The service has said why the request makes no progress; `is_loss`: its worker was lost."""
        self._reason, self._lost = message, _WORKER_LOST if is_loss else self._lost

    def looked(self, load: Load, now: float) -> None:
        """The service has answered GetLoad."""
        lost = load.worker_lost_seconds
        # A worker that was lost before the last part has not caused this pause.
        if lost is not None and now - lost >= self.last - _ROUNDING_SECONDS:
            self._lost = _WORKER_LOST
        if self._lost == _WORKER_LOST:
            reason = f": {load.worker_lost_reason}" if load.worker_lost_reason else ""
            self._cause = f"{_WORKER_LOST}{reason}; the answer goes on when another worker has it"
        else:
            self._cause = load.not_serving

    def unreachable(self, reason: str) -> None:
        """The service has not answered GetLoad."""
        self._lost, self._reason = self._lost or "connection lost", ""
        self._cause = f"connection lost ({reason}); trying again"

    def part(self, now: float, num_tokens: int = 1) -> str:
        """A part of the answer has come. Returns what is worth telling of the pause before it; empty if nothing is."""
        told = f"{self._lost}, resumed after {now - self.last:.1f} s" if self._lost else ""
        self.last, self.num_parts, self.first = now, self.num_parts + 1, self.first or now
        self.first_tokens = self.first_tokens or num_tokens
        self._reason = self._cause = self._lost = ""
        return told

    def status(self, now: float) -> str:
        """The line below the answer; empty while it comes without a pause."""
        seconds = now - self.last
        if seconds < QUIET_SECONDS:
            return ""
        if cause := self._reason or self._cause:
            return f"{cause} ({seconds:.0f} s)"
        if not self.num_parts and self.requests_ahead:
            return f"waiting behind {counted(self.requests_ahead, 'request')} ({seconds:.0f} s)"
        return f"waiting ({seconds:.0f} s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    # The line of figures; empty if the answer has no end.
    figures: str = ""
    error: Exception | None = None
    is_interrupted: bool = False


async def ask(
    client: AsyncClient, screen: Screen, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> Answer:
    """Sends the conversation and shows the answer. Ctrl-C ends it; what has come is in the result."""
    started = time.monotonic()
    silence = Silence(started)
    try:
        stream = client.generate(chat=messages, resume=True, **settings)
    except (TypeError, ValueError) as error:
        return Answer(error=error)
    failed: Exception | None = None
    async with _background(_draw(screen, silence), _look(client, silence)):
        is_interrupted = False
        try:
            is_interrupted = not await _until_interrupted(
                _read(stream, screen, silence, settings.get("max_new_tokens"))
            )
        except errors.TandemError as error:
            failed = error
        finally:
            stream.close()
    screen.finish()
    (sample, *_) = stream.samples
    figures = ""
    if stream.summary is not None and silence.first is not None:
        figures = closing_line(stream, silence.first - started, silence.first_tokens, silence.last - silence.first)
    return Answer(
        text=sample.text,
        reasoning=sample.reasoning,
        calls=sample.tool_calls,
        figures=figures,
        error=failed,
        is_interrupted=is_interrupted,
    )


async def _read(stream: AsyncGenerateStream, screen: Screen, silence: Silence, asked: int | None) -> None:
    """Reads the stream into the screen, to its end. `asked`: as in `show.lowered`. Raises TandemError."""
    async for message in stream.messages():
        match message.WhichOneof("event"):
            case "accepted":
                silence.requests_ahead = message.accepted.requests_ahead
                if told := lowered(stream, asked, "max_new_tokens"):
                    screen.note(told)
            case "waiting":
                is_loss = message.waiting.reason == inference_pb2.WAIT_REASON_WORKER_LOST
                silence.waits(message.waiting.message, is_loss=is_loss)
            case "delta":
                if told := silence.part(time.monotonic(), delta_tokens(message.delta)):
                    screen.note(told)
                if message.delta.reasoning:
                    screen.add(Kind.REASONING, message.delta.reasoning)
                if message.delta.text:
                    screen.add(Kind.CONTENT, message.delta.text)
            case _:
                pass


async def _until_interrupted(reading: Any) -> bool:
    """Runs the reading; Ctrl-C cancels it. Returns whether it came to its end."""
    task = asyncio.ensure_future(reading)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await asyncio.wait((task,))
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        task.cancel()
    if task.cancelled():
        return False
    task.result()
    return True


async def _draw(screen: Screen, silence: Silence) -> None:
    while True:
        began = time.monotonic()
        screen.refresh(silence.status(began))
        await asyncio.sleep(max(_DRAW_SECONDS, (time.monotonic() - began) / _DRAW_SHARE))


async def _look(client: AsyncClient, silence: Silence) -> None:
    """Asks for the cause of a silence."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        if time.monotonic() - silence.last < _LOOK_SECONDS:
            continue
        parts = silence.num_parts
        try:
            load = await client.load(timeout=_LOAD_SECONDS)
            silence.looked(load, time.monotonic())
        except errors.Unavailable as error:
            # Not if the answer went on meanwhile.
            if silence.num_parts == parts:
                silence.unreachable(error.message)
        except (errors.TandemError, ValueError):
            # Not every caller may ask, and several services at once cannot be asked.
            return


@contextlib.asynccontextmanager
async def _background(*work: Any) -> AsyncGenerator[None]:
    """Runs tasks beside the body, and ends them with it."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
