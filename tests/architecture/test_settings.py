"""All programs may share one environment: each ignores the others' settings by name, and refuses unknown ones."""

from gpu_worker.settings import OTHER_PROGRAMS_SETTINGS as KNOWN_TO_WORKER
from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import OTHER_PROGRAMS_SETTINGS as KNOWN_TO_SCHEDULER
from scheduler_svc.settings import SchedulerSettings

# The client reads one variable, TANDEM_ADDRESS.
CLIENT = {"address"}


def test_every_program_ignores_the_others_settings() -> None:
    scheduler, worker = set(SchedulerSettings.model_fields), set(WorkerSettings.model_fields)
    every = scheduler | worker | CLIENT
    assert scheduler | KNOWN_TO_SCHEDULER == every
    assert worker | KNOWN_TO_WORKER == every
