"""What `tandem serve` prints: all lines of its programs and its own. Owns the form of a line.

`screen.Screen` is the display of a terminal, with the phases of the start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem_client.services.lines import Repeats
from tandem_client.services.phases import Phase
from tandem_client.services.programs import READY
from tandem_contract.logs import LineWriter, LogFormat, as_json, escaped
from tandem_contract.processes import State, Supervisor

# The name of this command before its own lines.
OWN = "serve"
# The seconds for the reader of the output to take the last lines.
FLUSH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    api: str
    address: str
    command: str


def formed(name: str, line: str, log_format: LogFormat | None = None) -> str:
    """A line of a program, with the program's name. One of a JSON log names its process already."""
    return as_json(name, line) if log_format == "json" else f"{name:>9} | {escaped(line)}"


class Display:
    """Each line of every program, as it comes; of repeats in a text log their number. No control characters.

    Called in one thread. Nothing waits for the reader of the output.
    """

    def __init__(self, writer: LineWriter, log_format: LogFormat | None = None) -> None:
        self.writer = writer
        self._log_format: LogFormat | None = log_format
        self.repeats = Repeats(self.log)

    def log(self, name: str, line: str) -> None:
        """Takes a line of a program or of this command where the log is; repeats are left out by then."""
        self.writer.write(formed(name, line, self._log_format))

    def end_phase(self, phase: Phase) -> None:
        """Notes the end of a phase that no program reports."""

    def show(self, name: str, line: str) -> None:
        # Not a program's `ready` line: this command prints one when all serve.
        if READY.search(line) is not None:
            return
        # Programs count the records of a JSON log, in which members may differ where the message does not.
        take = self.log if self._log_format == "json" else self.repeats.show
        take(name, line)

    def say(self, line: str) -> None:
        self.log(OWN, line)

    def ended(self, program: Supervisor) -> None:
        """Says how a program has ended, if it starts again; else the whole command ends and says it."""
        if program.state == State.PAUSED:
            self.say(str(program.ended))

    def ready(self, endpoints: Sequence[Endpoint]) -> None:
        """Says where the service is reached, now and after each time that it was not."""
        self.say(", ".join(f"{endpoint.api} at {endpoint.address}" for endpoint in endpoints))
        # The last line is the one for gRPC, which is always there.
        for endpoint in reversed(endpoints):
            self.say(f"ready: {endpoint.command}")

    def stopping(self, line: str) -> None:
        self.say(line)

    def look(self) -> None:
        """Says what is due. Called now and then."""
        self.repeats.look()

    def log_to(self, path: Path) -> None:
        """Takes a file for the lines that are not printed."""

    def fail(self) -> None:
        """Says where to look, because this command ends by a failure, which it prints last."""

    def close(self) -> None:
        self.repeats.close()
        self.writer.close(FLUSH_SECONDS)
