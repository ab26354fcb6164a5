"""A worker of two ranks with captured and replayed steps, on a CPU: `python -m tests.rigs.recorded_ranks`."""

import sys

from gpu_worker.group.launch import Meeting, launch

if __name__ == "__main__":
    sys.exit(launch(2, [*sys.argv[1:], "--ranks", "2"], Meeting(), program="tests.rigs.recorded_worker"))
