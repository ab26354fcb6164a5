"""A part for the test of limits: it writes a figure, starts a process and does not end by itself."""

import subprocess
import sys
import time

from tests.measure.gpu_day.day import Day


def run(day: Day) -> None:
    """Ends when it is stopped."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    day.record.figure("process", process.pid, "")
    try:
        time.sleep(3600)
    finally:
        day.record.note("what the process said")
