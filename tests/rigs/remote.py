"""Workers over TCP with CURVE for system tests: the keys, the scheduler that listens, the flags of a worker."""

import shutil
from pathlib import Path

from scheduler_svc.remote import ADMITTED, PUBLIC_SUFFIX, WORKERS, make
from tests.rigs.processes import Rig, SchedulerProcess

_CONNECT = r"workers of other hosts connect to (tcp://\S+)"


class RemoteKeys:
    """Keys in the rig's folder, as `tandem keys` makes them."""

    def __init__(self, rig: Rig, *names: str) -> None:
        self.folder = rig.runtime_dir / "keys"
        make(self.folder, list(names))

    def scheduler_flags(self, host: str = "127.0.0.1") -> list[str]:
        """A port that the system chooses."""
        return ["--workers-listen", f"tcp://{host}:0", "--workers-keys", str(self.folder)]

    def worker_flags(self, scheduler: SchedulerProcess, name: str) -> list[str]:
        """The flags of worker `name`, once the scheduler listens."""
        address = scheduler.wait_line(_CONNECT).group(1)
        return ["--connect", address, "--keys", str(self.folder / WORKERS / name)]

    def public_file(self, name: str) -> Path:
        """The file that admits the worker."""
        return self.folder / ADMITTED / f"{name}{PUBLIC_SUFFIX}"

    def shut_out(self, name: str) -> Path:
        """Removes the worker's key from the admitted ones; returns where it is now."""
        return Path(shutil.move(self.public_file(name), self.folder / f"{name}.away"))
