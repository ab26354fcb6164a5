"""Each place that can fail by itself is listed with what notices it: threads and tasks, and what writes files.

A needed thread or task ends its program when it fails, and is not listed. A place is a file and its outermost class or
function.
"""

import ast

from tests.architecture.source import places

FOLDERS = ("protos/tandem_contract", "scheduler_svc", "gpu_worker", "client/tandem_client")
SERVICES = ("scheduler_svc", "client/tandem_client/gateway", "protos/tandem_contract")
# Those that are not needed, and where their exceptions go.
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
    "client/tandem_client/gateway/admission.py Callers": "each caller awaits it",
    "client/tandem_client/gateway/app.py App": "each caller awaits it",
    "client/tandem_client/gateway/generation.py Generation": "pings of one stream",
    "client/tandem_client/gateway/generation.py _while_present": "it is awaited",
    "client/tandem_client/gateway/generation.py together": "they are awaited",
    "protos/tandem_contract/needed.py needed_task": "it is the rule",
    "scheduler_svc/frontend/constraints/trials.py TrialProcess": "it is awaited",
    "scheduler_svc/frontend/control.py CoreQueries": "each caller awaits it",
    "scheduler_svc/frontend/grpc_tuning/call_lines.py CallLine": "it ends one call; gRPC logs it",
    "scheduler_svc/frontend/grpc_tuning/event_loop.py run_as_task": "it ends one call",
    "scheduler_svc/frontend/rpc/calls.py Calls": "it ends one call",
    "scheduler_svc/frontend/server.py FrontEnd": "they are awaited; a model that cannot be loaded is logged",
    "scheduler_svc/metrics/http_server.py HttpServer": "it ends one connection",
}
START, ONCE = "the program says why it does not start", "a command that says so and ends"
# What happens where it cannot write, on a full disk say.
WRITERS = {
    "client/tandem_client/cli/chat/session.py history_path": "None: the history is kept in memory",
    "client/tandem_client/cli/chat/session.py Session": "its caller says so; what was there stays",
    "client/tandem_client/cli/commands/local.py plot": ONCE,
    "client/tandem_client/cli/commands/token.py new": ONCE,
    "client/tandem_client/cli/reporting.py _discard_output": "/dev/null",
    "client/tandem_client/demo/__main__.py main": ONCE,
    "client/tandem_client/gateway/metrics.py Meter": "memory of the file that `run` has written in full",
    "client/tandem_client/gateway/server.py run": START,
    "client/tandem_client/services/lines.py LogFile": "`serve` says so once; the programs run on",
    "client/tandem_client/services/lines.py _append": "`serve` says so once; the programs run on",
    "client/tandem_client/training/rollout.py TandemRollout": "its caller gets the error",
    "gpu_worker/checkpoint/files.py read_config": START,
    "gpu_worker/checkpoint/folder.py _open_into": START,
    "gpu_worker/checkpoint/folder.py opened_weights": f"{START}; an update of weights is refused",
    "gpu_worker/constraints/frames.py new_memory": "memory, not a file",
    "gpu_worker/group/launch.py _Ranks": START,
    "gpu_worker/memory/device_memory.py resident_growth": "/proc",
    "gpu_worker/memory/model_facts.py _write": "a warning; the next start takes longer",
    "gpu_worker/native/build.py _compile": "a warning; torch's own operators are used",
    "gpu_worker/native/build.py _own": "a warning; torch's own operators are used",
    "gpu_worker/process/starting.py _session_at_low_priority": "/proc",
    "gpu_worker/process/threads.py choose_or_follow": "nothing; the next worker measures again",
    "gpu_worker/sharding/trial.py PlanTrial": "a warning; the next start compares again",
    "gpu_worker/sharding/trial.py _whole": START,
    "gpu_worker/shared_pool/holder_pools.py Pools": "memory, not a file",
    "protos/tandem_contract/files.py KeyFile": f"{START}; later `RuntimeDir` logs it once",
    "protos/tandem_contract/files.py _cache_home": "the next folder is used",
    "protos/tandem_contract/files.py _make_private": "the next folder is used",
    "protos/tandem_contract/files.py own_runtime_dir": START,
    "protos/tandem_contract/fork_server.py ForkServer": "a socket",
    "protos/tandem_contract/fork_server.py serve_forks": "/proc",
    "protos/tandem_contract/logs.py to_descriptor": "lines are counted, and their number is logged later",
    "protos/tandem_contract/logs.py open_closed_streams": "/dev/null",
    "protos/tandem_contract/needed.py _failed": "the last line of a program that ends",
    "protos/tandem_contract/private_file.py create": "its callers are listed",
    "protos/tandem_contract/stopping.py _has_terminal": "/dev/tty, to look whether there is one",
    "protos/tandem_contract/writing.py RecordFile": "the rule of recordings",
    "scheduler_svc/core/schedule/plan_builder.py PlanBuilder": "no file: a method of this name",
    "scheduler_svc/journal/file.py JournalFolder": f"{START}; later a crash is not counted",
    "scheduler_svc/journal/file.py JournalWriter": "suspended: the log and GetLoad say that streams would not survive",
    "scheduler_svc/journal/reader.py _restored": START,
    "scheduler_svc/processes/frontends.py _FrontEnd": "a pipe",
    "scheduler_svc/processes/runtime_dir.py RuntimeDir": f"{START}; later it is logged once, and connections stay",
    "scheduler_svc/recording/flight.py main": "/dev/null",
    "scheduler_svc/recording/flight_files.py catch_fatal_signals": "a warning; no stacks at a fatal signal",
    "scheduler_svc/recording/flight_files.py created": "it is logged once, and the file removed",
    "scheduler_svc/recording/flight_files.py prepare": "its callers log it once",
    "scheduler_svc/remote.py _write": ONCE,
    "scheduler_svc/remote.py make": ONCE,
    "scheduler_svc/simulator/__main__.py ": "/dev/null",
    "scheduler_svc/simulator/traces.py write_trace": ONCE,
}
_WRITES = frozenset(
    (
        *("write_text", "write_bytes", "mkdir", "makedirs", "touch", "symlink_to", "pwrite", "ftruncate"),
        *("mkdtemp", "mkstemp", "TemporaryDirectory", "TemporaryFile", "NamedTemporaryFile"),
        *("copyfile", "copy2", "copytree", "save_file", "save_pretrained"),
    )
)
_OF_OS = frozenset(("write", "link", "symlink", "rename", "replace", "open"))


def _uses(names: set[str], *folders: str) -> set[str]:
    """The places of each call, or base class, of these names."""
    found = set[str]()
    for place, node in places((ast.Call, ast.ClassDef), *folders):
        used = [node.func] if isinstance(node, ast.Call) else getattr(node, "bases", [])
        if {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in used} & names:
            found.add(place)
    return found


def _is_write(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id in (*_WRITES, "put") or (function.id == "open" and _opens_to_write(call, 1))
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    if owner == "os" and function.attr in _OF_OS:
        return function.attr != "open" or any(flag in ast.unparse(call) for flag in ("O_CREAT", "O_WRONLY", "O_RDWR"))
    if owner == "private_file" and function.attr in ("create", "put"):
        return True
    if function.attr == "open":
        return _opens_to_write(call, 0)
    return function.attr in _WRITES


def _opens_to_write(call: ast.Call, at: int) -> bool:
    modes = [*call.args[at : at + 1], *(each.value for each in call.keywords if each.arg == "mode")]
    return any(
        isinstance(node, ast.Constant) and set(str(node.value)) & set("wax+")
        for mode in modes
        for node in ast.walk(mode)
    )


def test_each_thread_is_needed_or_listed() -> None:
    assert _uses({"Thread", "start_new_thread"}, *FOLDERS) == THREADS.keys()


def test_each_task_of_a_service_is_needed_or_listed() -> None:
    assert _uses({"create_task", "ensure_future"}, *SERVICES) == TASKS.keys()


def test_each_place_that_writes_a_file_is_listed() -> None:
    assert {place for place, call in places(ast.Call, *FOLDERS) if _is_write(call)} == WRITERS.keys()
