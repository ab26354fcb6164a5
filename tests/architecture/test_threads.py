"""Every thread and task of a service ends its program when it fails, or is listed with who notices that it has."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import ROOT

FOLDERS = ("protos/tandem_contract", "scheduler_svc", "gpu_worker", "client/tandem_client")
# Those whose own exceptions reach somebody else.
THREADS = {
    "gpu_worker/native/build.py build_ahead": "`built_library` builds again and raises",
    "gpu_worker/process/starting.py at_low_priority": "the caller raises it",
    "protos/tandem_contract/child.py reap_orphans": "zombies stay, nothing else",
    "protos/tandem_contract/needed.py NeededThread": "it is the rule",
    "scheduler_svc/door/token_file.py TokenFile": "the tokens read before stay in force; it is logged, and read again",
    "scheduler_svc/journal/file.py _Syncing": "it keeps its error; the writer suspends the journal",
    "scheduler_svc/metrics/http_server.py HttpServer": "the page ends with a line; the service does not need it",
    "scheduler_svc/recording/flight.py FlightRecorder": "one file is missing; the service does not need it",
}
TASKS = {
    "client/tandem_client/gateway/accepting.py Acceptor": "it is awaited, or ends one connection",
    "client/tandem_client/gateway/accepting.py Turns": "it is awaited, or ends one connection",
    "client/tandem_client/gateway/admission.py Callers": "each caller awaits it",
    "client/tandem_client/gateway/app.py App": "each caller awaits it",
    "client/tandem_client/gateway/exchange.py Pulse": "one ping",
    "client/tandem_client/gateway/generation.py _while_present": "it is awaited",
    "client/tandem_client/gateway/generation.py together": "they are awaited",
    "protos/tandem_contract/needed.py needed_task": "it is the rule",
    "scheduler_svc/frontend/constraints/trials.py TrialProcess": "it is awaited",
    "scheduler_svc/frontend/control.py CoreQueries": "each caller awaits it",
    "scheduler_svc/frontend/grpc_tuning/event_loop.py run_as_task": "it ends one call",
    "scheduler_svc/frontend/rpc/calls.py Calls": "it ends one call",
    "scheduler_svc/frontend/server.py FrontEnd": "they are awaited; a model that cannot be loaded is logged",
    "scheduler_svc/metrics/http_server.py HttpServer": "it ends one connection",
}


def _calls(names: tuple[str, ...], folders: tuple[str, ...]) -> Iterator[str]:
    """Yields the file and the outermost class or function of each call, or base class, of these names."""
    for path in sorted(path for folder in folders for path in Path(ROOT, folder).rglob("*.py")):
        for outer in ast.parse(path.read_text()).body:
            for node in ast.walk(outer):
                used = (
                    [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
                )
                found = [each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in used]
                if set(found) & set(names):
                    yield f"{path.relative_to(ROOT)} {getattr(outer, 'name', '')}"


def test_each_thread_is_needed_or_listed() -> None:
    assert sorted(set(_calls(("Thread", "start_new_thread"), FOLDERS))) == sorted(THREADS)


def test_each_task_of_a_service_is_needed_or_listed() -> None:
    services = ("scheduler_svc", "client/tandem_client/gateway", "protos/tandem_contract")
    assert sorted(set(_calls(("create_task", "ensure_future"), services))) == sorted(TASKS)
