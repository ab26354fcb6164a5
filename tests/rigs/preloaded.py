"""Processes that need not import: a process that has imported what they import, and has started nothing, forks them.

Each is as one that `subprocess` starts with the same program: a child of its user, with the arguments (also for the
system), variables, folder and descriptors that it was given, a seed of its own, and an end of its own: an ordinary
interpreter's, or a signal's. It differs where modules read variables at their import, in the parts of the product that
it has imported and does not use, and at its end, which takes no modules down; so a program is started in the ordinary
way if its variables are other than the forking process's, and tests of imports and of whole ends start it themselves.

Programs that start others have children ready, which become the first of them. One process that forks is forked from
another that has imported what both need.
"""

from tests.rigs.forked_end import after_exit_functions

# isort: split
import argparse
import atexit
import ctypes
import gc
import importlib
import inspect
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

_SERVICE, _GATEWAY, _COMMAND, _WORKER = "scheduler_svc", "tandem_client.gateway", "tandem_client.cli", "gpu_worker"
_CLIENT, _COMMANDS = "tandem_client", "tandem_client.cli.commands"
# The module of each program that looks which program is run.
_IMPORT_PATH = ".import_path"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One process that forks. `base`: the kind that it is forked from, if it is not started. `modules`: what its
    programs import, at once and later. `variables`: what they set before they import. `late`: variables that these
    modules read when they run; PYTHONPATH is one if the programs themselves are always those of this checkout.
    """

    base: str | None = None
    programs: tuple[str, ...]
    modules: tuple[str, ...]
    late: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


_BARE, _TORCH = "without torch", "torch alone"
_FORKING = "tests.rigs.preloaded"
# Otherwise gRPC writes to the terminal, and Transformers says that torch is missing.
_QUIET = (("GRPC_VERBOSITY", "NONE"), ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"))
_KINDS = {
    _BARE: _Kind(
        programs=(
            *(_SERVICE, "gpu_worker.holder", "scheduler_svc.recording.replay"),
            *("tests.rigs.checking_worker", "tests.rigs.known_secrets", "tests.gpu_worker.holder.user"),
            *("gpu_worker.constraints", _FORKING),
        ),
        modules=(
            *("scheduler_svc.__main__", "scheduler_svc.frontend.__main__", "scheduler_svc.frontend.server"),
            *("tests.rigs.preloaded_chat", "tandem_client.gateway.__main__", "tandem_client.gateway.server"),
            *("gpu_worker.holder", "tests.rigs.checking_worker", "scheduler_svc.recording.replay"),
            *("gpu_worker.constraints.__main__", "gpu_worker.constraints.server"),
            *("scheduler_svc.metrics.page", "scheduler_svc.metrics.http_server", "encodings.idna"),
        ),
        variables=_QUIET,
    ),
    _TORCH: _Kind(programs=(_FORKING,), modules=("torch", "transformers", "gpu_worker.__main__")),
    "with torch": _Kind(
        base=_TORCH,
        programs=(_WORKER, "tests.rigs.reference_tokens", "tests.gpu_worker.native.crashing_worker"),
        modules=(
            *("tests.rigs.preloaded_torch", "gpu_worker.startup"),
            *("gpu_worker.link.link", "gpu_worker.native.library"),
        ),
        # Of what builds and keeps kernels.
        late=("CXX", "PATH", "XDG_CACHE_HOME"),
    ),
    "with the compiler": _Kind(
        base=_TORCH,
        programs=(
            *(_WORKER, "tests.rigs.recorded_worker", "tests.rigs.recorded_ranks"),
            *("tests.gpu_worker.sharding.one_trial", "tests.census.ranked"),
        ),
        modules=(
            *("tests.rigs.preloaded_compiler", "gpu_worker.startup"),
            *("gpu_worker.link.link", "tests.rigs.graph_recorder", "tests.rigs.padded_shapes"),
        ),
    ),
    # `tandem serve` starts a service.
    "client": _Kind(
        base=_BARE,
        programs=(_COMMAND, _GATEWAY),
        modules=(
            "tandem_client.cli.__main__",
            *(f"{_COMMANDS}.{name}" for name in ("chat", "generate", "local", "queries", "serve", "token")),
            "tandem_client.cli.chat.loop",
            "typer.rich_utils",
            "uvicorn.protocols.http.httptools_impl",
            "uvloop",
        ),
        late=("COLUMNS", "LINES", "NO_COLOR", "PROMPT_TOOLKIT_NO_CPR", "PYTHONPATH", "TERM", "XDG_STATE_HOME"),
    ),
    "machines": _Kind(
        base=_BARE,
        programs=("tests.contract.machines",),
        modules=(
            *("tests.contract.machines", "gpu_worker.cluster.fleet", "gpu_worker.group.launch"),
            *("scheduler_svc.processes.frontends", "tandem_client.services.pair"),
        ),
    ),
}
# Workers with them import the compiler.
_WITH_COMPILER = ("--ranks", "--fused-layers")
# The number of its first children, by program: that of a flag, and without the flag. A group starts twice.
_CHILDREN = {
    _SERVICE: ("--frontends", 1),
    "tests.rigs.known_secrets": ("--frontends", 1),
    _GATEWAY: ("--processes", 0),
    _WORKER: ("--ranks", 0),
    "tests.rigs.recorded_ranks": ("--ranks", 2),
}
_SERVED, _MOST_CHILDREN, _STARTS_OF_GROUP = 4, 8, 2
# Of this process after all tests were collected, before the first runs.
environment: dict[str, str] = {}
# A variable of each test; and what the programs read when they run.
_READ_LATE = ("PYTEST_CURRENT_TEST", "TANDEM_", "_TANDEM_PARENT")
_PATH = "PYTHONPATH"

_PR_SET_CHILD_SUBREAPER = 36
_MAX_ORDER_BYTES, _MAX_DESCRIPTORS = 128 << 10, 64
# Room for the arguments that the system shows.
_ROOM = "-" * (16 << 10)
_FIRST_UNUSED = 100
# A test may replace it.
_PYTHON = sys.executable
# What the system shows of a child that is ready and nothing yet.
_SPARE = ["(spare)"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What a process shall become. `descriptors` are its numbers of those that come with the order."""

    command: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    in_new_session: bool
    # 0: a new one; -1: that of the process that starts it.
    group: int


class Popen(subprocess.Popen[str]):
    """As `subprocess.Popen` of `python -m`, from `server`. A terminal that is stdin becomes that of a new session."""

    def __init__(self, server: "Server", command: Sequence[str], **options: Any) -> None:
        self._server = server
        super().__init__(command, **options)

    def _execute_child(self, *arguments: Any) -> None:
        _execute(self, _given(self, arguments), self._server.fork)


# The ordinary start, also where the class gets another one.
_EXECUTE = subprocess.Popen._execute_child
_SIGNATURE = inspect.signature(_EXECUTE)


def _given(popen: subprocess.Popen, arguments: tuple) -> Mapping[str, Any]:
    return _SIGNATURE.bind(popen, *arguments).arguments


def _order(given: Mapping[str, Any]) -> tuple[_Order, list[int]]:
    """The order, and this process's descriptors for it."""
    assert given["preexec_fn"] is None, "a process that is forked runs no preexec_fn"
    ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    streams = [number if end == -1 else end for number, end in enumerate(ends)]
    passed = list(given["pass_fds"])
    environment = dict(os.environ if given["env"] is None else given["env"])
    folder = os.path.abspath(given["cwd"] or os.curdir)
    order = _Order(
        command=list(given["args"]), environment=environment, folder=folder, descriptors=[0, 1, 2, *passed],
        in_new_session=given["start_new_session"], group=given["process_group"],
    )  # fmt: skip
    return order, [*streams, *passed]


def _execute(popen: subprocess.Popen, given: Mapping[str, Any], fork: Callable[[_Order, list[int]], int]) -> None:
    """Does what `subprocess` does to start a process, with a fork in its place."""
    try:
        popen.pid = fork(*_order(given))
    finally:
        _close(popen, given)
    popen._child_created = True


def _close(popen: subprocess.Popen, given: Mapping[str, Any]) -> None:
    """Closes the child's ends, as `subprocess` does."""
    names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    popen._close_pipe_fds(*(given[name] for name in names))


def _send(connection: socket.socket, order: _Order, descriptors: list[int]) -> None:
    socket.send_fds(connection, [json.dumps(asdict(order)).encode()], descriptors)


def _receive(connection: socket.socket) -> tuple[_Order, list[int]] | None:
    """An order and this process's descriptors for it; None if the user has ended."""
    packet, descriptors, _, _ = socket.recv_fds(connection, _MAX_ORDER_BYTES, _MAX_DESCRIPTORS)
    return (_Order(**json.loads(packet)), descriptors) if packet else None


def kind_of(arguments: Sequence[str]) -> str | None:
    """Which kind of process forks a program of these arguments; None if it is to be started."""
    kinds = [kind for kind, one in _KINDS.items() if arguments[0] in one.programs]
    needs_compiler = any(argument.startswith(_WITH_COMPILER) for argument in arguments)
    return (kinds[-1] if needs_compiler else kinds[0]) if kinds else None


def base_of(kind: str) -> str | None:
    return _KINDS[kind].base


class Server:
    """The user's end of the process that forks."""

    def __init__(
        self, environment: Mapping[str, str], folder: Path, kind: str = _BARE, base: "Server | None" = None
    ) -> None:
        """Forks only for this environment; its programs are those of the folder. `base`: that of `base_of` this kind.

        The process that forks is itself forked from the base, if there is one.
        """
        self._environment, self._late = dict(environment), (*_READ_LATE, *_KINDS[kind].late)
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", _FORKING, str(theirs.fileno()), kind]
            options: dict[str, Any] = {"cwd": folder, "env": self._environment, "pass_fds": (theirs.fileno(),)}
            options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            # A fork has the room of its base.
            self._process = (
                subprocess.Popen([*command, _ROOM], **options) if base is None else Popen(base, command, **options)
            )
        atexit.register(self.close)
        assert self._control.recv(1), "the process that forks cannot import"

    def close(self) -> None:
        """Ends the process that forks, not those that it has forked."""
        self._control.close()
        self._process.wait()

    def can_fork(self, environment: Mapping[str, str]) -> bool:
        """Whether modules would read the same variables at their import in this environment.

        More folders may come before those of PYTHONPATH, with packages in place of others.
        """
        ours, theirs = self._read_early(self._environment), self._read_early(environment)
        return theirs.pop(_PATH, "").endswith(ours.pop(_PATH, "")) and ours == theirs

    def _read_early(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in environment.items() if not name.startswith(self._late)}

    def fork(self, order: _Order, descriptors: list[int]) -> int:
        """Returns the id of a new child of this process. The descriptors stay the caller's."""
        with self._lock:
            # The process that forks leaves its child an orphan, which becomes a child of this process.
            _adopt(True)
            try:
                _send(self._control, order, descriptors)
                return int(self._control.recv(32))
            finally:
                _adopt(False)


@contextmanager
def forking(server: Server, program: str) -> Iterator[None]:
    """Has `subprocess` fork a program wherever it would start it with this Python."""

    def execute(popen: subprocess.Popen, *arguments: Any) -> None:
        given = dict(_given(popen, arguments))
        words = [word for word in given["args"] if word != "-P"]
        if words[:3] != [_PYTHON, "-m", program]:
            return _EXECUTE(popen, *arguments)
        return _execute(popen, given | {"args": words}, server.fork)

    with patch.object(subprocess.Popen, "_execute_child", execute):
        yield


def _adopt(is_on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def main() -> None:
    """Forks until the user has ended; a fork becomes the program that it was ordered to be."""
    # Ctrl-C is for those that it forks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    # numpy's library of linear algebra, which the programs do not use, starts its threads at its import.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    kind = _KINDS[sys.argv[2]]
    os.environ.update(kind.variables)
    for name in kind.modules:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        # It becomes the main module, or looks which program that is.
        is_main = name in kind.programs and not hasattr(module, "__path__")
        if is_main or name.endswith((".__main__", _IMPORT_PATH)):
            del sys.modules[name]
    assert ("torch" in sys.modules) == (_TORCH in {sys.argv[2], kind.base})
    assert ("torch._inductor" in sys.modules) == (sys.argv[2] == "with the compiler")
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has no other thread"
    gc.collect()
    gc.freeze()
    control.send(b"+")
    while received := _receive(control):
        if (pid := _fork_orphan(received[1])) is None:
            # Frozen, it is in no list of objects: at the end of the program it would close a number of the program's.
            control.detach()
            _begin(*received)
        control.send(str(pid).encode())


def _fork_orphan(descriptors: list[int]) -> int | None:
    """Returns the process's id, and None in the process."""
    reading, writing = os.pipe()
    waiting, going = os.pipe()
    middle = os.fork()
    if not middle:
        if pid := os.fork():
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.close(going)
        # Until the process in the middle has ended, and this one has its other parent.
        os.read(waiting, 1)
        return None
    for number in (waiting, writing, *descriptors):
        os.close(number)
    os.waitpid(middle, 0)
    os.close(going)
    with open(reading, "rb") as file:
        return int(file.read())


def _begin(order: _Order, descriptors: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _take(order, descriptors)
    # Python's own flag -P is that of a program which another one starts.
    at = order.command.index("-m") + 1
    program, arguments = order.command[at], order.command[at + 1 :]
    _prepare_children(program, arguments)
    _run(program, arguments)


def _take(order: _Order, descriptors: list[int]) -> None:
    """Takes what a program gets from the process that starts it."""
    if order.in_new_session:
        os.setsid()
    elif order.group >= 0:
        os.setpgid(0, order.group)
    # The server's own would close numbers that are the program's, when the program ends.
    for each in [each for each in gc.get_objects() if isinstance(each, socket.socket)]:
        each.detach()
    # Above all numbers that it shall have.
    limit = max(_FIRST_UNUSED, *order.descriptors) + 1
    high = [_duplicate(number, limit) for number in descriptors]
    for number, source in zip(order.descriptors, high, strict=True):
        os.dup2(source, number)
    last = 2
    for number in sorted(order.descriptors):
        if number > last:
            os.closerange(last + 1, number)
            last = number
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
    if order.in_new_session and os.isatty(0):
        import fcntl
        import termios

        # One that is another session's stays so.
        with suppress(OSError):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(order.folder)
    # With Python's flag -P nothing is imported from the folder.
    _import_from([*(() if "-P" in order.command[:3] else (order.folder,)), *_named(order.environment)])
    for name in os.environ.keys() - order.environment.keys():
        del os.environ[name]
    os.environ.update(order.environment)
    sys.orig_argv = order.command
    _show(order.command)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _import_from(first: list[str]) -> None:
    """Has modules sought in these folders first, as Python does at its start."""
    ours = _named(os.environ)
    sys.path[:] = [*first, *(path for path in sys.path[1:] if path not in ours)]
    for more in set(first) - set(ours):
        for path in Path(more).iterdir() if os.path.isdir(more) else ():
            # It stands in for what has this name elsewhere.
            sys.modules.pop(path.stem, None)


def _named(environment: Mapping[str, str]) -> list[str]:
    """The folders from which a start imports first, after the working directory."""
    return list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))


def _duplicate(number: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(number, fcntl.F_DUPFD, least)


def _show(command: list[str]) -> None:
    """Has the system show this command."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # arg_start and arg_end, proc_pid_stat(5).
    begin, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in command)
    assert len(text) <= end - begin, f"{len(text)} bytes of arguments, at most {end - begin}"
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _run(program: str, arguments: list[str]) -> None:
    """Runs the program as `python -m` does, in the emptied main module."""
    names = vars(sys.modules["__main__"])
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    sys.argv = ["-m", *arguments]
    if program.startswith(f"{_CLIENT}."):
        # The package, which has been imported, begins with this.
        importlib.import_module(f"{_CLIENT}{_IMPORT_PATH}")
    with after_exit_functions():
        runpy._run_module_as_main(program)
        # Its return value, the names of the module, must not become the exit code.
        sys.exit()


def _prepare_children(program: str, arguments: list[str]) -> None:
    """Forks the first children of the program, and has its `subprocess` use them."""
    spares = [_fork_spare() for _ in range(min(_num_children(program, arguments), _MOST_CHILDREN))]
    if not spares:
        return

    def take(order: _Order, descriptors: list[int]) -> int:
        pid, connection = spares.pop(0)
        with connection:
            _send(connection, order, descriptors)
        return pid

    def execute(popen: subprocess.Popen, *given: Any) -> None:
        values = _given(popen, given)
        if not spares or list(values["args"][:3]) != [sys.executable, "-P", "-m"]:
            return _EXECUTE(popen, *given)
        return _execute(popen, values, take)

    subprocess.Popen._execute_child = execute


def _num_children(program: str, arguments: list[str]) -> int:
    if program == _COMMAND:
        return _SERVED if arguments[:1] == ["serve"] else 0
    if program not in _CHILDREN:
        return 0
    flag, default = _CHILDREN[program]
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument(flag, type=int, default=default, dest="number")
    with suppress(argparse.ArgumentError):
        number = int(parser.parse_known_args(arguments)[0].number)
        if flag == "--ranks":
            # A rank starts no others.
            return 0 if number == 1 or "RANK" in os.environ else number * _STARTS_OF_GROUP
        # A gateway of one process is that one.
        return 0 if program == _GATEWAY and number < 2 else number
    return 0


def _fork_spare() -> tuple[int, socket.socket]:
    """A child that becomes the program of the order which its socket gets; it ends if that is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        theirs.close()
        return pid, ours
    ours.close()
    _show(_SPARE)
    received = _receive(theirs)
    if received is None:
        os._exit(0)
    _begin(*received)
    raise AssertionError("a program ends its process")


if __name__ == "__main__":
    from tests.rigs import preloaded

    preloaded.main()
