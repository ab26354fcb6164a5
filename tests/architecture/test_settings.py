"""One environment may serve all programs: each knows the others' settings by name, and no more than those."""

from gpu_worker.settings import OTHER_PROGRAMS_SETTINGS as KNOWN_TO_WORKER
from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import OTHER_PROGRAMS_SETTINGS as KNOWN_TO_SCHEDULER
from scheduler_svc.settings import SchedulerSettings

# The client reads one variable, TANDEM_ADDRESS.
CLIENT = {"address"}


def test_each_program_knows_every_name() -> None:
    scheduler, worker = set(SchedulerSettings.model_fields), set(WorkerSettings.model_fields)
    every = scheduler | worker | CLIENT
    assert scheduler | KNOWN_TO_SCHEDULER == every
    assert worker | KNOWN_TO_WORKER == every
