"""What ends a program: an exception in a thread or a task without which it would go on and do nothing."""

import subprocess
import sys
import threading

import pytest

from tandem_contract import needed
from tests.rigs.processes import child_environment, no_threads

PROGRAM = """
import asyncio, contextlib, sys, threading, time
from tandem_contract import logs
from tandem_contract.needed import NeededThread, ends_with_needed, needed_task
kind, is_program = sys.argv[1], sys.argv[2] == "program"
if is_program:
    logs.start("core", level="info", log_format="text")

def fails():
    raise ValueError("the cause")

async def fails_later():
    await asyncio.sleep(0)
    fails()

async def run():
    task = needed_task(fails_later(), "its task")
    await asyncio.wait([task])
    task = needed_task(asyncio.sleep(60), "another")
    task.cancel()
    await asyncio.wait([task])

with ends_with_needed("core") if is_program else contextlib.nullcontext():
    if kind == "task":
        asyncio.run(run())
    else:
        make = NeededThread if kind == "needed" else threading.Thread
        thread = make(target=fails, name="its thread")
        thread.start()
        thread.join()
print("goes on")
"""


def run(kind: str, where: str) -> tuple[int, str, list[str]]:
    """Returns the status, stdout, and the lines of stderr without those of stacks."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind, where], capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("     ")]
    return done.returncode, done.stdout, [line.partition(" core ")[2] or line for line in lines]


@pytest.mark.parametrize(
    ("kind", "which"), [("needed", "thread its thread"), ("task", "task its task"), ("other", "thread its thread")]
)
def test_a_program_ends_with_what_it_needs_and_outlives_its_other_threads(kind: str, which: str) -> None:
    status, out, lines = run(kind, "program")
    last = [f"core: the {which} failed, and nothing goes on without it: ValueError: the cause"]
    assert (status, out) == ((0, "goes on\n") if kind == "other" else (1, ""))
    assert lines == [
        f"CRITICAL uncaught exception in {which}",
        "    Traceback (most recent call last):",
        "    ValueError: the cause",
        *([] if kind == "other" else last),
    ]


@pytest.mark.parametrize("kind", ["needed", "task"])
def test_a_program_that_uses_the_client_is_never_ended(kind: str) -> None:
    assert run(kind, "library")[:2] == (0, "goes on\n")


def test_what_it_set_is_given_back_however_it_ends() -> None:
    @needed.ends_with_needed("outer")
    def main() -> None:
        hooks.append((needed._program, threading.excepthook))
        with needed.ends_with_needed("inner"):
            hooks.append((needed._program, threading.excepthook))
        hooks.append((needed._program, threading.excepthook))
        raise SystemExit

    before, hooks = threading.excepthook, list[tuple[str, object]]()
    with pytest.raises(SystemExit):
        main()
    ours = needed._thread_failed
    assert hooks == [("outer", ours), ("inner", ours), ("outer", ours)]
    assert (needed._program, threading.excepthook) == ("", before)


# The module of each program, and arguments with which its main function begins.
PROGRAMS = {
    "scheduler_svc": ["scheduler_svc"],
    "frontend": ["scheduler_svc.frontend", "9"],
    "scheduler_svc.constraint_trial": ["scheduler_svc.constraint_trial"],
    "gpu_worker": ["gpu_worker"],
    "gpu_worker.constraints": ["gpu_worker.constraints"],
    "holder": ["gpu_worker.holder"],
    "gateway": ["tandem_client.gateway"],
    "tandem serve": ["tandem_client.cli", "serve"],
    "demo": ["tandem_client.demo"],
}
# One of these functions is what each program begins with.
BEGINS = """
import runpy, sys, time
from tandem_contract import fork_server, stopping
from tandem_contract.needed import NeededThread
module, *sys.argv[1:] = sys.argv[1:]
def fails():
    raise ValueError("the cause")
def begin(*_):
    NeededThread(target=fails, name="its thread").start()
    time.sleep(60)
stopping.begin = fork_server.serve_forks = begin
if module in ("tandem_client.cli", "tandem_client.demo"):
    from tandem_client.services import programs
    programs.missing_programs = begin
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_ends_with_what_it_needs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGINS, *PROGRAMS[name]], capture_output=True, text=True, check=False, timeout=60,
        env=child_environment(),
    )  # fmt: skip
    last = f"{name}: the thread its thread failed, and nothing goes on without it: ValueError: the cause"
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (1, [last])


# Code that starts each needed thread of the programs, with something in it that fails.
THREADS = {
    "log writer": """
logs.LineWriter._next_texts = fails
logs.announce("the line after which it fails")
""",
    "output": """
from tandem_contract.child import Child, Program
Child._read = fails
child = Child(Program(argv=("true",)), lambda: None)
""",
    "end": """
from tandem_contract.child import Child, Program
Child._wait = fails
child = Child(Program(argv=("true",)), lambda: None)
""",
    "fork-server": """
from tandem_contract import fork_server
life = fork_server._Life(fails)
""",
    "key check": """
import zmq
from scheduler_svc.remote import KeyCheck
class Admitted:
    names = {}
    poll = fails
context = zmq.Context()
checked = KeyCheck(context, Admitted())
""",
    "signs of life": """
from gpu_worker.group.pulse import Pulse
from gpu_worker.process.ranks import Ranks
Pulse._listen = fails
pulse = Pulse(Ranks(rank=1, size=2, local_rank=1, local_size=2), None)
pulse.start()
""",
    "prepare": """
from gpu_worker.constraints.server import MaskServer
MaskServer._prepare = fails
MaskServer.__init__ = lambda self: None
server = MaskServer()
server._progress, server._show = {}, lambda *_: None
server._slowness, server._send = 1.0, lambda _: time.sleep(60)
server.serve()
""",
    "supervisor": """
from gpu_worker.cluster import fleet
fleet.run = fails
worker = fleet.Worker(fleet.Fleet(name="it"), 0)
""",
}
FAILING = """
import sys, threading, time
from tandem_contract import logs
from tandem_contract.needed import ends_with_needed
logs.start("core", level="info", log_format="text")
body = ends_with_needed("core")
body.__enter__()
def fails(*_):
    raise ValueError("the cause")
{start}
time.sleep(60)
"""


@pytest.mark.parametrize("name", THREADS)
def test_no_needed_thread_of_any_program_ends_without_it(name: str) -> None:
    code = FAILING.format(start=THREADS[name])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1] == f"core: the thread {name} failed, and nothing goes on without it: ValueError: the cause"
    assert any(line.endswith(f" core CRITICAL uncaught exception in thread {name}") for line in lines)
    assert "    ValueError: the cause" in lines


def test_a_thread_that_the_system_refuses_is_an_error_of_the_system() -> None:
    with no_threads(), pytest.raises(BlockingIOError, match="can't start new thread"):
        needed.started(threading.Thread(target=print))
