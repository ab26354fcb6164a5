"""What the programs read of their flags, variables and files, before any of them starts.

Their own reader answers, in processes beside this one, which imports neither the programs nor pydantic.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tandem_contract.logs import last_line

SCHEDULER, WORKER, GATEWAY = "scheduler", "worker", "gateway"
_MODULES = {
    SCHEDULER: "scheduler_svc.settings",
    WORKER: "gpu_worker.settings",
    GATEWAY: "tandem_client.gateway.settings",
}
_CODE = "from tandem_contract.settings_check import main; main()"

Settings = Mapping[str, Any]
"""By name, as JSON has them: a path is a string, a setting without a value None."""


class SettingsRefused(Exception):
    """The message has a line for each setting that is refused, behind the names of the programs that refuse it."""


class HelpAsked(Exception):
    """The flags of a program ask for its help or version, which is the message."""


class SettingsReader:
    """A process that reads the settings of programs. It gets ready while this one does something else."""

    def __init__(self, *names: str) -> None:
        # A session of its own: Ctrl-C reaches this process alone.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, *(f"{name}={_MODULES[name]}" for name in names)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def read(self, flags: Mapping[str, Sequence[str]]) -> dict[str, Settings]:
        """Returns the settings of each program with these flags. Raises SettingsRefused, HelpAsked."""
        out, errors = self._process.communicate(json.dumps({name: list(each) for name, each in flags.items()}))
        if self._process.returncode:
            raise SettingsRefused(f"the settings cannot be read: {last_line(errors.splitlines())}")
        answers: dict[str, dict[str, Any]] = json.loads(out)
        for answer in answers.values():
            if "says" in answer:
                raise HelpAsked(answer["says"].rstrip("\n"))
        _refuse({name: answer["problems"] for name, answer in answers.items() if "problems" in answer})
        return {name: answer["settings"] for name, answer in answers.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def _refuse(problems: Mapping[str, Sequence[str]]) -> None:
    """Raises SettingsRefused if there are any. Programs have settings in common, of which each problem is one line."""
    by_line: dict[str, list[str]] = {}
    for name, lines in problems.items():
        for line in lines:
            by_line.setdefault(line, []).append(name)
    if by_line:
        raise SettingsRefused("\n".join(f"{' and '.join(names)}: {line}" for line, names in by_line.items()))
