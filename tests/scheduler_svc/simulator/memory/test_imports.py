"""What importing the comparison brings with it."""

import subprocess
import sys

from tests.architecture.source import ROOT


def test_the_comparison_imports_neither_services_nor_matplotlib():
    probe = "import sys, scheduler_svc.simulator.memory\nprint({'matplotlib', 'zmq', 'grpc'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "set()\n"
