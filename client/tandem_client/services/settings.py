"""What the programs read of their flags, variables and files, before any of them starts.

Their own reader answers, in a fork of this process, which does not import the programs itself. A new process would
import once more what this one has imported by then: pydantic, for the flags of its own command. A question and its
answer are lines, JSON objects by the name of a program. The question has its flags, the answer `settings`, `problems`
(a line for each that is refused), or `says`, what --help or --version prints.
"""

import contextlib
import importlib
import io
import json
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TextIO

from tandem_contract import stopping

if TYPE_CHECKING:
    from tandem_contract.settings import Program

SCHEDULER, WORKER, GATEWAY = "scheduler", "worker", "gateway"
_MODULES = {
    SCHEDULER: "scheduler_svc.settings",
    WORKER: "gpu_worker.settings",
    GATEWAY: "tandem_client.gateway.settings",
}
# How often a wait looks for a signal.
_LOOK_MS = 200

Settings = Mapping[str, Any]
"""By name, as JSON has them: a path is a string, a setting without a value None."""


class SettingsRefused(Exception):
    """The message has a line for each setting that is refused, behind the names of the programs that refuse it."""


class HelpAsked(Exception):
    """The flags of a program ask for its help or version, which is the message."""


def flag_of(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def flags(**values: object) -> list[str]:
    """The flags of these settings, without those that are None."""
    return [f"{flag_of(name)}={value}" for name, value in values.items() if value is not None]


class SettingsReader:
    """A fork that reads the settings of programs, and gets ready while this process does something else.

    Make it before this process has other threads.
    """

    def __init__(self, *names: str) -> None:
        ours, theirs = socket.socketpair()
        with stopping.kept_from_children():
            self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _answer({name: _MODULES[name] for name in names}, theirs.makefile("rw"))
        theirs.close()
        self._answered = select.poll()
        self._answered.register(ours, select.POLLIN)
        with ours:
            self._stream = ours.makefile("rw")

    def read(self, flags: Mapping[str, Sequence[str]]) -> dict[str, Settings]:
        """Returns the settings of each program with these flags. Raises SettingsRefused, HelpAsked."""
        line = ""
        # If it has ended, it may have said why.
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(f"{json.dumps({name: list(words) for name, words in flags.items()})}\n")
            self._stream.flush()
        # Python handles a signal between two calls: one that comes as a call begins to wait does not end it.
        while not self._answered.poll(_LOOK_MS):
            pass
        with contextlib.suppress(ConnectionError):
            line = self._stream.readline()
        answers: dict[str, dict[str, Any]] | str = json.loads(line) if line else "their reader was killed"
        if isinstance(answers, str):
            raise SettingsRefused(f"the settings cannot be read: {answers}")
        for answer in answers.values():
            if "says" in answer:
                raise HelpAsked(answer["says"].rstrip("\n"))
        # Programs have settings in common, of which each problem is one line.
        by_line: dict[str, list[str]] = {}
        for name, answer in answers.items():
            for problem in answer.get("problems", ()):
                by_line.setdefault(problem, []).append(name)
        if by_line:
            raise SettingsRefused("\n".join(f"{' and '.join(names)}: {each}" for each, names in by_line.items()))
        return {name: answer["settings"] for name, answer in answers.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        with contextlib.suppress(BrokenPipeError):
            self._stream.close()


def _answer(modules: Mapping[str, str], stream: TextIO) -> NoReturn:
    """What the fork does: answers each question of the stream, to its end."""
    from tandem_contract.child import PARENT, die_with_parent

    try:
        # Ctrl-C reaches the other process alone, at whose end, however it comes, this one ends too.
        os.setsid()
        os.environ.pop(PARENT, None)
        die_with_parent()
        # Before the first question comes.
        programs = {name: importlib.import_module(module).PROGRAM for name, module in modules.items()}
        while question := stream.readline():
            asked: dict[str, list[str]] = json.loads(question)
            stream.write(f"{json.dumps({name: _read(programs[name], flags) for name, flags in asked.items()})}\n")
            stream.flush()
    except BaseException as error:
        with contextlib.suppress(OSError):
            stream.write(f"{json.dumps(f'{type(error).__name__}: {error}')}\n")
            stream.flush()
    finally:
        os._exit(0)


def _read(program: "Program[Any]", flags: Sequence[str]) -> dict[str, object]:
    # The programs have imported it.
    from tandem_contract.settings import SettingError

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            return {"settings": program.read(flags, os.environ).model_dump(mode="json", by_alias=True)}
    except SettingError as error:
        return {"problems": str(error).splitlines()}
    except SystemExit:
        return {"says": said.getvalue()}
