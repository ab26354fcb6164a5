"""One environment serves all programs: each reads variables with its own prefix, and a few that both share."""

from gpu_worker import settings as worker
from scheduler_svc import settings as scheduler

SCHEDULER_SETTINGS = set(scheduler.SchedulerSettings.model_fields)
WORKER_SETTINGS = set(worker.WorkerSettings.model_fields)


def test_the_programs_use_different_prefixes_of_variables() -> None:
    prefixes = [scheduler.ENV_PREFIX, worker.ENV_PREFIX]
    assert prefixes == ["TANDEM_SCHEDULER_", "TANDEM_WORKER_"]
    assert scheduler.OLD_PREFIX == worker.OLD_PREFIX == "TANDEM_"


def test_both_programs_share_the_same_settings() -> None:
    assert scheduler.SHARED_SETTINGS == worker.SHARED_SETTINGS
    # Both programs have `config` too, but a file has the keys of one program.
    assert scheduler.SHARED_SETTINGS | {"config"} == SCHEDULER_SETTINGS & WORKER_SETTINGS


def test_no_old_variable_name_begins_with_the_prefix_of_a_program() -> None:
    every = SCHEDULER_SETTINGS | WORKER_SETTINGS
    assert not [name for name in every if name.startswith(("scheduler_", "worker_", "address"))]
