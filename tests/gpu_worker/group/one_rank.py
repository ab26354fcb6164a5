"""A rank of a launcher's test: `python -m tests.gpu_worker.group.one_rank STORE_VARIABLE FOLDER WHAT`.

`refuse`: rank 1 prints a sentence and ends with exit code 2, the others wait. `die`: at the first start rank 1 ends
with a signal; at the second all ranks end in order. `tidied`: rank 1 also removes the folder of the store, and at the
second start all refuse without one. `end`: they end in order at the first. `lead`: rank 0 ends when its launcher asks,
and rank 1 after it. `STORE_VARIABLE` is the launcher's, whose import takes longer than all that a rank does.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from tandem_contract.stopping import STOP


def main() -> None:
    """See the module's docstring."""
    store_variable, folder, what = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    rank = int(os.environ["RANK"])
    store = Path(os.environ.get(store_variable, ""))
    if what == "tidied" and not store.parent.is_dir():
        os._exit(2)
    (folder / f"{rank}-{os.getpid()}").touch()
    starts = len(list(folder.glob(f"{rank}-*")))
    # The end of rank 1 would end a rank 0 that has not come so far.
    while rank == 1 and len(list(folder.glob("0-*"))) < starts:
        time.sleep(0.01)
    if what == "refuse" and rank == 1:
        print("rank 1 refuses", file=sys.stderr, flush=True)
        os._exit(2)
    if what == "tidied":
        if rank == 1 and starts == 1:
            shutil.rmtree(store.parent)
        what = "die"
    if what == "end" or (what == "die" and starts > 1):
        return
    if what == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "lead":
        lead(rank, folder)
        return
    time.sleep(60)


def lead(rank: int, folder: Path) -> None:
    """Ends rank 0 as its launcher asks; rank 1 notes that it ended after it, and in order."""
    if rank == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, [STOP])
        (folder / "leads").touch()
        signal.sigwait([STOP])
        (folder / "left").touch()
        return
    while not (folder / "left").exists():
        time.sleep(0.01)
    (folder / "followed").touch()


if __name__ == "__main__":
    main()
