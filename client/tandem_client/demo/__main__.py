"""`python -m tandem_client.demo`: a worker is killed while it streams, and no completion changes.

Sends the same prompts in two rounds. In the middle of the second round the demo kills the worker with SIGKILL, and
another worker starts. The exit code is 0 only if each completion equals that of the first round. On a terminal the
streams are shown live; otherwise each stream is one line when it has ended.
"""

import asyncio
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tandem_client.async_client import AsyncClient
from tandem_client.demo.rounds import PROMPTS, Round, asked, differing
from tandem_client.errors import TandemError
from tandem_client.services.pair import TOY_NOTICE, ServicePair, is_toy
from tandem_client.services.programs import PROGRAMS, missing_programs
from tandem_client.services.settings import SCHEDULER, WORKER, Settings, SettingsReader, SettingsRefused, flags
from tandem_contract.logs import parse
from tandem_contract.needed import ends_with_needed
from tandem_contract.plural import numbered
from tandem_contract.processes import WRONG_SETTINGS, Policy, ServiceEnded, State, Supervisor

_FRAMES_PER_SECOND = 12
_TAIL_CHARACTERS = 100
_WIDTH_WITHOUT_TERMINAL = 140
_COMPLETION_WIDTH = 70

_INTERRUPTED = 130
# The time for the lines about the kill to end after the last stream.
_LAST_WORD_SECONDS = 1.0
# A cold start compiles kernels.
_READY_SECONDS = 240.0
_STOP_SECONDS = 20.0
_LOOK_SECONDS = 0.01


class Teller:
    """Prints lines with the seconds since the demo began and the name of the speaker."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, speaker: str, message: str) -> None:
        style = "bold" if speaker == "demo" else "dim"
        line = Text(f"{self.seconds:7.2f} s  {speaker:<9}  {message}", style=style)
        self.console.print(line, soft_wrap=True)

    def say_itself(self, message: str) -> None:
        self.say("demo", message)


class Services:
    """The scheduler service and the worker. The worker is restarted once; any other end of a process is a failure."""

    def __init__(
        self, teller: Teller, *, scheduler_flags: Sequence[str], worker_flags: Sequence[str], settings: Settings
    ) -> None:
        """`settings`: what the scheduler reads of its flags."""
        self._teller = teller
        # Leaves out the scheduler service's line per request.
        self.quiet = False
        self._pair = ServicePair(
            scheduler_flags=scheduler_flags,
            worker_flags=worker_flags,
            scheduler_policy=Policy(max_ends=1),
            # The demo kills the worker once.
            worker_policy=Policy(max_ends=2, first_pause_seconds=0.0),
            settings=settings,
            on_line=self._on_line,
            on_end=self._on_end,
            say=teller.say_itself,
        )
        self.guard, self.ready, self.worker = self._pair.guard, self._pair.ready, self._pair.worker

    async def start(self) -> str:
        """Starts both at once and waits until the service is ready; returns its address. Raises ServiceEnded."""
        began = time.monotonic()

        async def ready() -> str:
            await self._pair.listening()
            took = f"{time.monotonic() - began:.1f} s"
            self._teller.say_itself(f"the scheduler service listens ({took}); it waits for a worker")
            address = await self.ready()
            self._teller.say_itself(f"the worker has joined ({time.monotonic() - began:.1f} s): ready")
            return address

        self._teller.say_itself("starting the scheduler service and the worker, two processes")
        self._pair.start()
        try:
            async with asyncio.timeout(_READY_SECONDS):
                return await self.guard(ready())
        except TimeoutError:
            raise ServiceEnded(f"the service is not ready after {_READY_SECONDS:g} s") from None

    async def kill_worker(self) -> None:
        """Kills the worker with SIGKILL and waits until another one has been started."""
        num_starts = self.worker.num_starts
        self.worker.signal(signal.SIGKILL)
        while self.worker.num_starts == num_starts:
            await asyncio.sleep(_LOOK_SECONDS)

    async def stop(self) -> list[str]:
        """Stops both, the worker last; returns a line for each that did not end well."""
        self._teller.say_itself("stopping both processes")
        began = time.monotonic()
        wrong = await self._pair.stop(_STOP_SECONDS)
        self._teller.say_itself(f"both processes have ended ({time.monotonic() - began:.1f} s)")
        return wrong

    def _on_end(self, program: Supervisor) -> None:
        if program.state == State.PAUSED:
            self._teller.say_itself(str(program.ended))

    def _on_line(self, name: str, line: str) -> None:
        read = parse(line)
        if self.quiet and name == SCHEDULER and read.level == "INFO":
            return
        # The demo has its own clock, and prints levels only from warnings on.
        self._teller.say(name, read.message if read.level in ("", "INFO") else f"{read.level} {read.message}")


def streams_table(playing: Round) -> Table:
    """Returns the streams of one round, side by side."""
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("tokens", justify="right", width=6)
    table.add_column("text", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("ended by", width=8)
    for one in playing.completions:
        grown = Text(one.prompt, style="bold")
        grown.append(one_line(one.text)[-_TAIL_CHARACTERS:], style="not bold")
        table.add_row(str(len(one.token_ids)), grown, one.ended_by)
    return table


async def play(client: AsyncClient, teller: Teller, playing: Round) -> None:
    """Plays a round; shows its streams live on a terminal, and otherwise a line for each that has ended."""
    is_live = teller.console.is_terminal

    def on_done(index: int) -> None:
        if not is_live:
            done, number = playing.completions[index], f"{index + 1} of {len(playing.completions)}"
            teller.say("stream", f"{number}: {numbered(len(done.token_ids), 'token')}, {done.ended_by}")

    live = Live(
        console=teller.console,
        get_renderable=lambda: streams_table(playing),
        refresh_per_second=_FRAMES_PER_SECOND,
        transient=True,
    )
    with live if is_live else nullcontext():
        await playing.play(client, on_done)


def one_line(text: str) -> str:
    """Returns the text with single blanks in place of line breaks and runs of blanks."""
    blank = " " if text[:1].isspace() else ""
    return blank + " ".join(text.split())


def round_line(name: str, result: Round) -> str:
    firsts = sorted(completion.first_token_seconds for completion in result.completions)
    return (
        f"{name}: {numbered(len(result.completions), 'completion')}, "
        f"{numbered(result.num_tokens, 'token')} in {result.seconds:.2f} s "
        f"({result.num_tokens / result.seconds:.0f} tokens/s), first token after {firsts[len(firsts) // 2]:.3f} s "
        f"(median), {numbered(result.steps, 'step')}, at most {result.pages_used} "
        f"of {numbered(result.pages_total, 'page')} used"
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
            "–" if one.tokens_per_second is None else f"{one.tokens_per_second:.0f}",
            str(other.worker_changes),
            str(other.recomputed_tokens),
            "NO" if index in differing else "yes",
            Text(one_line(other.prompt + other.text)),
        )
    return table


@ends_with_needed("demo")
def main(
    listen: Annotated[str | None, typer.Option(help="Default: a free port.")] = None,
    runtime_dir: Annotated[Path | None, typer.Option(help="Default: a temporary folder.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; default: the bundled one.")] = None,
    device: Annotated[str | None, typer.Option()] = None,
    dtype: Annotated[str | None, typer.Option()] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the worker; default: measured.")] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Length of each completion.")] = 64,
    scheduler: Annotated[str, typer.Option(help="More flags of the scheduler service.")] = "",
    worker: Annotated[str, typer.Option(help="More flags of the worker.")] = "",
) -> None:
    """Serve, stream, kill the worker, compare."""
    # Otherwise gRPC's library logs between the demo's lines.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    missing = missing_programs(PROGRAMS)
    if missing:
        print(f"error: {' and '.join(missing)} cannot be found: the demo runs in a checkout", file=sys.stderr)
        raise typer.Exit(1)
    console = Console(highlight=False)
    # Without a terminal it is wide enough for the table.
    teller = Teller(console if console.is_terminal else Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL))
    with tempfile.TemporaryDirectory(prefix="tandem-demo-") as folder:
        shared = flags(runtime_dir=runtime_dir or Path(folder) / "run")
        settings = flags(model=model, device=device, dtype=dtype, threads=threads)
        given = {
            SCHEDULER: [*flags(listen=listen or "127.0.0.1:0"), *shared, *shlex.split(scheduler)],
            WORKER: [*settings, *shared, *shlex.split(worker)],
        }
        try:
            with SettingsReader(*given) as reader:
                read = reader.read(given)
        except SettingsRefused as error:
            print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
            raise typer.Exit(WRONG_SETTINGS) from None
        services = Services(
            teller, scheduler_flags=given[SCHEDULER], worker_flags=given[WORKER], settings=read[SCHEDULER]
        )
        with suppress(KeyboardInterrupt):
            raise typer.Exit(asyncio.run(_demo(services, teller, tokens)))
    raise typer.Exit(_INTERRUPTED)


async def _demo(services: Services, teller: Teller, num_tokens: int) -> int:
    problems: list[str] = []
    try:
        async with AsyncClient(await services.start()) as client:
            problems += await _both_rounds(services, client, teller, num_tokens)
    except (ServiceEnded, TandemError) as error:
        problems.append(str(error))
    finally:
        problems += await services.stop()
    for problem in problems:
        teller.say_itself(f"FAILED: {problem}")
    if not problems:
        teller.say_itself(f"all {numbered(len(PROMPTS), 'completion', 'are')} equal, with and without the kill")
    return 1 if problems else 0


async def _both_rounds(services: Services, client: AsyncClient, teller: Teller, num_tokens: int) -> list[str]:
    undisturbed, disturbed = (Round(completions=asked(num_tokens)) for _ in range(2))
    info = await client.model_info()
    services.quiet = True
    pages, rows = numbered(info.num_pages, "page"), numbered(info.max_rows, "row")
    teller.say_itself(f"serving {info.model}: {pages} of {numbered(info.page_size, 'token')}, {rows}")
    if is_toy(info):
        teller.say_itself(TOY_NOTICE)
    teller.say_itself(f"round 1, undisturbed: {numbered(len(PROMPTS), 'prompt')} at once")
    await services.guard(play(client, teller, undisturbed))
    teller.say_itself(round_line("round 1", undisturbed))

    teller.say_itself("round 2: the same prompts; the worker will be killed in the middle")
    killing = asyncio.create_task(_kill_in_the_middle(services, teller, disturbed, undisturbed.num_tokens // 3))
    try:
        await services.guard(play(client, teller, disturbed))
        await asyncio.wait([killing], timeout=_LAST_WORD_SECONDS)
    finally:
        # Also if the demo is interrupted, because the task would call a service that has stopped.
        killing.cancel()
    teller.say_itself(round_line("round 2", disturbed))

    services.quiet = False
    unequal = differing(undisturbed, disturbed)
    teller.console.print(result_table(undisturbed, disturbed, unequal))
    problems = [f"{disturbed.completions[index].prompt!r} came out differently after the kill" for index in unequal]
    if disturbed.lane_resets == 0 or not any(one.worker_changes for one in disturbed.completions):
        problems.append("the kill hit no running request, so it showed nothing")
    return problems


async def _kill_in_the_middle(services: Services, teller: Teller, playing: Round, num_tokens: int) -> None:
    await playing.wait_for(num_tokens)
    killed_at, come = teller.seconds, numbered(playing.num_tokens, "token")
    teller.say_itself(f"kill -9 {services.worker.pid}, the worker, after {come}; the streams wait")
    await services.kill_worker()
    teller.say_itself(f"another worker starts from nothing, process {services.worker.pid}")
    await services.ready()
    # Tokens of the killed worker may have arrived meanwhile. The next token is the new worker's.
    await playing.wait_for(playing.num_tokens + 1)
    teller.say_itself(f"tokens flow again, {teller.seconds - killed_at:.2f} s after the kill")


if __name__ == "__main__":
    typer.run(main)
