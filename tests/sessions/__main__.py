"""`python -m tests.sessions`: makes sessions with an earlier core and replays them with the core of this checkout.

python -m tests.sessions [--from COMMIT]    compare, by default with the commit that the digests were last changed in
python -m tests.sessions --update           write digests.json: the decisions of this checkout are the right ones
python -m tests.sessions --make FOLDER      write the logs of all sessions and their digests
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from scheduler_svc.recording.replay import replay
from tandem_contract.bounds import WireError
from tests.sessions.digests import DIGESTS, read, write
from tests.sessions.kinds import KINDS, make

_ROOT = Path(__file__).resolve().parents[2]
# Makes the sessions of the first digests: the commit that added them does not run by itself.
_FIRST = "198abb5f"


def make_all(folder: Path) -> dict[str, list[str]]:
    """Makes every session. Raises SystemExit if a kind lacks what it is named for."""
    digests: dict[str, list[str]] = {}
    for name, kind in KINDS.items():
        seen = Counter[str]()
        digests[name] = []
        for seed in kind.seeds:
            digest, events = make(name, seed, folder)
            digests[name].append(digest)
            seen += events
        if missing := [event for event in kind.events if not seen[event]]:
            raise SystemExit(f"the sessions of kind {name} have no {missing}")
    return digests


def _git(*arguments: object) -> str:
    command = ["git", "-C", str(_ROOT), *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@contextmanager
def _checkout(commit: str, folder: Path) -> Iterator[dict[str, str]]:
    """A worktree of the commit; yields the environment in which this Python runs its code."""
    _git("worktree", "add", "--quiet", "--detach", folder, commit)
    try:
        subprocess.run([sys.executable, "protos/build_hook.py"], cwd=folder, check=True, capture_output=True)
        paths = (str(folder / name) for name in ("", "client", "protos", ".stubs"))
        yield os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    finally:
        _git("worktree", "remove", "--force", folder)


def _changed() -> str:
    """Returns the last commit that changed the digests and can make their sessions."""
    commit = _git("log", "-1", "--format=%h", f"{_FIRST}..HEAD", "--", DIGESTS)
    return commit or _FIRST


def compare(commit: str) -> int:
    """Returns the number of logs to which this checkout's core gives other effects."""
    with TemporaryDirectory(prefix="tandem-sessions-") as name:
        folder, checkout = Path(name) / "logs", Path(name) / "checkout"
        with _checkout(commit, checkout) as environment:
            command = [sys.executable, "-m", "tests.sessions", "--make", str(folder)]
            subprocess.run(command, cwd=checkout, env=environment, check=True)
            if read(folder / DIGESTS.name) != read(checkout / DIGESTS.relative_to(_ROOT)):
                raise SystemExit(f"{commit} made other sessions than those whose digests it has")
        logs = sorted(path for path in folder.iterdir() if path.suffix != ".json")
        num_events = num_different = 0
        for path in logs:
            try:
                num_events += replay(path, audited=True)
            except (SystemExit, WireError) as error:
                num_different += 1
                print(f"{path.name}: {error}")
    print(f"{len(logs)} logs of {commit} with {num_events:,} events; {num_different} have other effects now")
    return num_different


def main() -> int:
    """Returns 1 if effects differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.sessions", description=__doc__)
    parser.add_argument("--from", dest="commit", metavar="COMMIT")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--make", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.update:
        with TemporaryDirectory(prefix="tandem-sessions-") as folder:
            write(DIGESTS, make_all(Path(folder)))
    elif arguments.make is not None:
        arguments.make.mkdir(parents=True)
        write(arguments.make / DIGESTS.name, make_all(arguments.make))
    else:
        return int(compare(arguments.commit or _changed()) > 0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
