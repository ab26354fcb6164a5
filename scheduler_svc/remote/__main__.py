"""`tandem keys`: makes the CURVE keys with which workers of other hosts join. Owns the command's flags and output."""

import scheduler_svc.import_path  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scheduler_svc.remote.key_files import ADMITTED, PUBLIC_SUFFIX, WORKERS, make
from tandem_contract.curve_keys import SCHEDULER_SECRET, KeyFileError

_DESCRIPTION = """\
Make the CURVE keys with which workers on other hosts prove who they are, and with which both sides encrypt. The
scheduler's keys are made once; a later call for the same folder adds workers."""
_EPILOG = """\
Where each file goes:
  DIR/scheduler.secret      stays on the scheduler's host: --workers-keys DIR
  DIR/admitted/NAME.public  stays there too; without this file the worker NAME is shut out, within seconds
  DIR/workers/NAME/         move this folder to the host of worker NAME: --keys FOLDER; it has worker.secret and
                            scheduler.public

Files have mode 0600. Both programs refuse a secret that others can read.

Example:
  tandem keys ~/tandem-keys gpu-1 gpu-2
  make run-scheduler WORKERS_LISTEN=tcp://0.0.0.0:50060 WORKERS_KEYS=~/tandem-keys
  make run-worker CONNECT=tcp://scheduler-host:50060 KEYS=~/gpu-1     # on gpu-1, with the folder workers/gpu-1"""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0, 1 if the keys cannot be made; exits with 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="tandem keys",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of the keys, mode 0700; made if missing")
    parser.add_argument("names", metavar="NAME", nargs="*", help="names of workers (default: worker)")
    args = parser.parse_args(arguments)
    folder, names = args.folder.absolute(), list(dict.fromkeys(args.names)) or ["worker"]
    try:
        make(folder, names)
    except KeyFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"scheduler: --workers-keys {folder}  ({SCHEDULER_SECRET} stays on its host)")
    for name in names:
        print(f"worker {name}: move {folder / WORKERS / name} to its host, and start it with --keys FOLDER")
    print(f"to shut a worker out: remove {folder / ADMITTED}/NAME{PUBLIC_SUFFIX}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
