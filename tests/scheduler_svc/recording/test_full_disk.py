"""Recordings on a disk that is really full: each goes on or ends by its own rule, and what was written is whole."""

from pathlib import Path

from tests.rigs.small_disk import run_on_small_disk

COMMON = """
import logging, os, sys
from pathlib import Path
from scheduler_svc.core.messages import effects as fx, events as ev
from scheduler_svc.core.messages.config import CoreConfig
from tests.scheduler_svc.recording.test_steps_file import report
logging.basicConfig(stream=sys.stdout, format="said %(message)s")
disk = Path(sys.argv[1])
(disk / "ballast").write_bytes(bytes(32 << 10))

def fill():
    file = os.open(disk / "fill", os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(file, bytes(1024)):
            pass
    except OSError:
        pass
    os.close(file)
"""


def run(tmp_path: Path, code: str) -> list[str]:
    return run_on_small_disk(tmp_path, "256k", COMMON + code)


def test_the_steps_file_loses_lines_and_goes_on(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
from scheduler_svc.recording.steps_file import HEADER, StepsFile
now = [0.0]
file = StepsFile(disk / "steps", lambda: now[0])
def write(first, last):
    for step in range(first, last):
        file.add(report(step))
        now[0] += 2
        file.turned(0.0)
write(0, 10)
fill()
write(10, 200)
os.unlink(disk / "ballast")
write(200, 210)
file.close()
first, *found = (disk / "steps").read_text().splitlines(keepends=True)
steps = [int(line.partition(",")[0]) for line in found]
print(first == HEADER, all(line.count(",") == HEADER.count(",") and line[-1] == chr(10) for line in found))
print(steps[:10] == list(range(10)), steps[-10:] == list(range(200, 210)), len(steps) < 210, 210 - len(steps))
""",
    )
    shown = [line for line in lines if not line.startswith("said")]
    num_lost = shown[1].rpartition(" ")[2]
    assert shown == ["True True", f"True True True {num_lost}"]
    said, named = [line for line in lines if line.startswith("said")], f"said the steps file {tmp_path}/steps"
    assert said == [
        f"{named} cannot be written: No space left on device; lines are lost until it can be",
        f"{named} is written again; records lost meanwhile: {num_lost}",
    ]


def test_the_event_log_ends_with_a_whole_entry_and_is_replayed(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
from tandem.internal.v1 import record_pb2
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import event_log
from scheduler_svc.recording.replay import replay
from scheduler_svc.wire import framing
core, recorder = Scheduler(CoreConfig()), event_log.Recorder(disk / "log", CoreConfig())
def turn(number):
    for index in range(number):
        entry = record_pb2.RecordedEvent(now=float(index), tick=record_pb2.Tick())
        recorder.arrived(entry.now, ev.Tick(), {"tick": entry.tick})
        recorder.handled(entry.now, ev.Tick(), core.handle(event_log.event_of(entry), entry.now))
        recorder.flush()
turn(50)
fill()
turn(1000)
os.unlink(disk / "ballast")
turn(50)
recorder.close()
count = replay(disk / "log")
print(50 <= count < 1050)
data = (disk / "log").read_bytes()
frames = framing.Frames(data, event_log.FORMAT)
print(len(list(frames)) == count + 1 and frames.extent.tail is framing.Tail.WHOLE)
""",
    )
    assert lines == [
        f"said the event log {tmp_path}/log cannot be written: No space left on device; the recording ends with the "
        "entry before, and the service continues",
        "True",
        "True",
    ]


def test_the_flight_recorder_names_each_death_and_its_trouble_once(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        """
from scheduler_svc.recording.flight import FlightRecorder, lines
flight = disk / "flight"
recorder = FlightRecorder(flight)
def die(now):
    for index in range(40):
        recorder.handled(now, ev.WorkerLost(worker=f"w-{index}", reason="x" * 60), [])
    recorder.checked(now + 2)
    recorder._writing.join()
die(0.0)
before = sorted(flight.iterdir())
fill()
die(20.0)
die(40.0)
print(sorted(flight.iterdir()) == before, len(before))
os.unlink(disk / "ballast")
die(60.0)
recorder.close()
print(len(list(flight.iterdir())), [len(list(lines(path))) > 1 for path in flight.iterdir()])
""",
    )
    shown = [line for line in lines if not line.startswith("said")]
    assert shown == ["True 1", "2 [True, True]"]
    said = [line for line in lines if line.startswith("said")]
    assert [" are in " in line for line in said] == [True, False, False, False, False, True]
    lost, trouble, lost_too, again = said[1:5]
    assert lost.endswith("the last events are not kept") and lost_too.endswith("the last events are not kept")
    assert trouble == (
        f"said the flight recorder's folder {tmp_path}/flight cannot be written: No space left on device; the service "
        "continues without its files"
    )
    assert again.startswith(f"said the flight recorder's folder {tmp_path}/flight is written again")
