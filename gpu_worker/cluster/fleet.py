"""What a fleet runs: the command of one worker, and the resources that it takes from its node.

Owns `Fleet`, which travels to the nodes as a plain dict, and its checks. A fleet names the folder of the keys and never
has a key. Knows nothing of Ray.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
WORKER_MODULE = "gpu_worker"
MAX_WORKERS = 1024


class FleetRefused(ValueError):
    """An argument cannot be used; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Equal workers under one name. A worker of several ranks is a group: a process per rank, on one node."""

    name: str
    connect: str
    keys: str
    """Folder with a worker's CURVE keys, at this path on each node."""
    flags: tuple[str, ...] = ()
    """Further flags of the worker."""
    ranks: int = 1
    gpus: int = 0
    """GPUs of one worker, all of its ranks together."""
    cpus: int = 1
    max_failures: int = 20
    module: str = WORKER_MODULE

    @property
    def namespace(self) -> str:
        """Where Ray keeps the names of this fleet's actors."""
        return namespace(self.name)

    def bundle(self) -> dict[str, float]:
        """The resources of one worker, all on one node.

        One bundle for all ranks and not one for each, because Ray shows a process only the GPUs of its own bundle.
        """
        found = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {kind: amount for kind, amount in found.items() if amount}

    def worker_flags(self) -> list[str]:
        """The flags of its process, which starts a process for each rank by itself if there are several."""
        ranks = ["--ranks", str(self.ranks)] if self.ranks > 1 else []
        return ["--connect", self.connect, "--keys", self.keys, "--exit-with-parent", *ranks, *self.flags]

    def command(self, python: str) -> list[str]:
        """The command of one worker on a node, whose interpreter is `python`."""
        return [python, "-P", "-m", self.module, *self.worker_flags()]

    def plain(self) -> dict[str, Any]:
        """Strings, numbers and lists alone."""
        return {**asdict(self), "flags": list(self.flags)}

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> Self:
        """The fleet of what `plain` returned."""
        return cls(**{**plain, "flags": tuple(plain["flags"])})


def namespace(fleet: str) -> str:
    """Ray's namespace of a fleet."""
    return f"tandem-{fleet}"


def check_name(name: str) -> str:
    """The name of a fleet. Raises FleetRefused."""
    if _NAME.fullmatch(name) is None:
        raise FleetRefused(
            f"name is {name[:80]!r}; it must have 1 to 63 letters, digits, dots, dashes or underscores and begin with "
            "a letter or digit"
        )
    return name


def gpus_of(flags: Sequence[str], ranks: int) -> int:
    """The GPUs of a worker with these flags: none with `--device cpu`, else one per rank. Raises FleetRefused."""
    device = _value(flags, "--device")
    if device == "cpu":
        return 0
    if device not in ("", "cuda"):
        raise FleetRefused(f"device is {device}; Ray gives each worker GPUs of its own, so it must be cuda or cpu")
    return ranks


def refuse_own_flags(flags: Sequence[str]) -> None:
    """Refuses flags of the worker that the fleet sets. Raises FleetRefused."""
    for flag in ("--connect", "--keys", "--exit-with-parent", "--ranks"):
        if flag in flags or any(each.startswith(f"{flag}=") for each in flags):
            raise FleetRefused(f"{flag} is a flag of `up`; give it before the --")


def _value(flags: Sequence[str], name: str) -> str:
    """The last value of a flag, empty without it."""
    found = ""
    for place, flag in enumerate(flags):
        if flag == name and place + 1 < len(flags):
            found = flags[place + 1]
        elif flag.startswith(f"{name}="):
            found = flag.removeprefix(f"{name}=")
    return found
