"""What `tandem serve` shows on a terminal: the phases of the start, where the service is reached, and what goes wrong.

The lines of the programs go to a file. One line is drawn again and again while a phase is under way. All output goes
through a `LineWriter`, so a terminal that is stopped stops nothing else.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tandem_client.services.display import FLUSH_SECONDS, OWN, Display, Endpoint, formed
from tandem_client.services.lines import LogFile, file_writer
from tandem_client.services.phases import Phase, Phases, Told
from tandem_client.services.settings import WORKER
from tandem_contract.logs import LineWriter, escaped, parse
from tandem_contract.processes import State, Supervisor

_FRAMES_PER_SECOND = 8
_PHASE_WIDTH = 26
# The most lines about a program that failed.
_MAX_EXPLAINING = 12
_WRONG = ("WARNING", "ERROR", "CRITICAL")


class Screen(Display):
    """Shows phases until the service is ready, and then what this command says."""

    def __init__(self, writer: LineWriter, encoding: str) -> None:
        super().__init__(writer)
        # The terminal as rich needs it: a file, whose text waits in the writer's queue.
        out: Any = SimpleNamespace(write=writer.put, encoding=encoding, flush=lambda: None, isatty=lambda: True)
        self._console = Console(file=out, highlight=False, markup=False, emoji=False)
        is_ascii = self._console.options.ascii_only
        self._done, self._failed = ("ok", "!!") if is_ascii else ("✓", "✗")
        self._spinner = Spinner("line" if is_ascii else "dots")
        self._phases = Phases()
        self._log: LineWriter | None = None
        self._log_path: Path | None = None
        # What the thread that writes the log has to say.
        self._news: deque[str] = deque()
        self._was_ready = False
        self._live = Live(
            console=self._console,
            get_renderable=self._under_way,
            refresh_per_second=_FRAMES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def log_to(self, path: Path) -> None:
        self._log_path = path
        self._log = file_writer(LogFile(path, self._news.append))
        self._print(f"  the log of all programs is {path}", style="dim")

    def end_phase(self, phase: Phase) -> None:
        self._phases.end(phase)
        self._tell_phases()

    def show(self, name: str, line: str) -> None:
        self.repeats.show(name, line)
        if self._live.is_started:
            # Standby workers start later.
            self._phases.hear(WORKER if name == f"{WORKER} 1" else name, line)
            self._tell_phases()

    def say(self, line: str) -> None:
        self.log(OWN, line)
        self._print(line)

    def ended(self, program: Supervisor) -> None:
        super().ended(program)
        if program.state == State.GIVEN_UP:
            self._fail_phase()
        if program.ended is not None and program.ended.status:
            for line in explaining(program.lines, program.ended.cause):
                self._print(f"  {escaped(line)}", style="dim")

    def ready(self, endpoints: Sequence[Endpoint]) -> None:
        took = self._phases.seconds
        for phase in Phase:
            self._phases.end(phase)
        self._tell_phases()
        self._live.stop()
        for endpoint in endpoints:
            self.log(OWN, f"ready: {endpoint.api} at {endpoint.address}")
        if self._was_ready:
            self._print("ready again", style="bold green")
            return
        self._was_ready = True
        self._print(f"ready after {took:.1f} s; Ctrl-C stops", style="bold green")
        for endpoint in endpoints:
            self._print(f"  {endpoint.api} at {endpoint.address}:")
            self._print(f"    {endpoint.command}")

    def stopping(self, line: str) -> None:
        self._live.stop()
        self.say(line)

    def look(self) -> None:
        super().look()
        while self._news:
            self._print(self._news.popleft(), style="yellow")

    def fail(self) -> None:
        self._fail_phase()
        if self._log_path is not None:
            self._print(f"  more in {self._log_path}", style="dim")

    def close(self) -> None:
        self._live.stop()
        self.repeats.close()
        if self._log is not None:
            self._log.close(FLUSH_SECONDS)
        self.look()
        self.writer.close(FLUSH_SECONDS)

    def _tell_phases(self) -> None:
        for told in self._phases.take():
            self._print(f"{self._done} {_line_of(told)}")
            self._live.refresh()

    def _fail_phase(self) -> None:
        if self._live.is_started and (now := self._phases.now()) is not None:
            self._live.stop()
            self._print(f"{self._failed} {_line_of(now)}", style="red")

    def _under_way(self) -> Table | Text:
        now = self._phases.now()
        if now is None:
            return Text()
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(self._spinner, _line_of(now), Text(now.detail, style="dim"))
        return line

    def _print(self, line: str, style: str = "") -> None:
        self._console.print(Text(line, style=style), soft_wrap=True)

    def log(self, name: str, line: str) -> None:
        if self._log is not None:
            self._log.write(formed(name, line))


def _line_of(told: Told) -> str:
    return f"{told.phase:<{_PHASE_WIDTH}}{told.seconds:6.1f} s"


def explaining(lines: Sequence[str], cause: str) -> list[str]:
    """Returns the last lines of a program that may say why it ended: what is wrong, and what is not a line of the log.

    Without the last one, which is shown as the cause.
    """
    wrong = [line for line in lines if line.strip() and parse(line).level in ("", *_WRONG)]
    if wrong and parse(wrong[-1]).message.strip() == cause:
        wrong.pop()
    return wrong[-_MAX_EXPLAINING:]
