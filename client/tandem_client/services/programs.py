"""The programs of a checkout that this package starts: their modules, and how each is kept running and told.

They are module names after `python -m` and are never imported here.
"""

import importlib.util
from collections.abc import Callable, Sequence

from tandem_contract.child import Program
from tandem_contract.processes import Heard, OnZero, Policy, State, Supervisor

PROGRAMS = ("scheduler_svc", "gpu_worker")
# Takes the name of a program and one line of its output.
OnLine = Callable[[str, str], None]

# A scheduler that was drained stays down, and the workers with it. Its crash loop ends the service.
SCHEDULER = Policy(max_ends=5, on_zero=OnZero.WANTED)
# The service goes on without it. Wrong settings, or a start that never serves, end the service.
RESTARTED = Policy()
# Its service is not needed.
OPTIONAL = Policy(needs_service=False, final=frozenset())


def missing_programs(modules: Sequence[str]) -> list[str]:
    """Returns the modules that `python -m` would not find here."""
    return [module for module in modules if importlib.util.find_spec(module) is None]


def kept(
    name: str,
    program: Callable[[], Program | None],
    policy: Policy,
    *,
    hear: Callable[[str], Heard],
    say: Callable[[str], None],
    on_end: Callable[[], None] = lambda: None,
) -> Supervisor:
    """A supervisor that says when its program starts again. `on_end` is called at each end, after the last line."""

    def on_change(one: Supervisor) -> None:
        if one.state not in (State.PAUSED, State.GIVEN_UP):
            return
        on_end()
        if one.state == State.PAUSED:
            say(str(one.ended))

    return Supervisor(name, program, policy, hear=hear, on_change=on_change)
