"""A part for the test of limits: it writes a figure, starts a process and never ends."""

import subprocess
import sys
import time

from tests.measure.gpu_day.day import Day


def run(day: Day) -> None:
    """Never returns."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    day.record.figure("process", process.pid, "")
    time.sleep(3600)
