"""The programs of a checkout that this package starts: their modules, and what follows their ends.

They are module names after `python -m` and are never imported here.
"""

import importlib.util
import re
from collections.abc import Callable, Sequence

from tandem_contract.processes import OnZero, Policy, Supervisor

PROGRAMS = ("scheduler_svc", "gpu_worker")
# A line of a program that serves, with the command that tries it.
READY = re.compile(r"\bready: (.*\btandem generate.*)$")
# Takes the name of a program and one line of its output.
OnLine = Callable[[str, str], None]
# Takes a program at each of its ends, after its last line, unless it was to stop.
OnEnd = Callable[[Supervisor], None]

# A scheduler that was drained stays down, and the workers with it. Its crash loop ends the service.
SCHEDULER = Policy(max_ends=5, on_zero=OnZero.WANTED)
# The service goes on without it. Wrong settings, or a start that never serves, end the service.
RESTARTED = Policy()
# Its service is not needed.
OPTIONAL = Policy(needs_service=False, final=frozenset())


def missing_programs(modules: Sequence[str]) -> list[str]:
    """Returns the modules that `python -m` would not find here."""
    return [module for module in modules if importlib.util.find_spec(module) is None]
