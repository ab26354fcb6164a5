"""`tandem serve`: the scheduler service and the workers of a checkout, side by side in one terminal.

Owns the command's flags and its exit code; `services.pair` owns the processes, `services.display` the output.
"""

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import typer

from tandem_client.address import DEFAULT_ADDRESS
from tandem_client.cli.flags import flag, parameter, takes
from tandem_client.cli.reporting import Exit, fail, require_programs
from tandem_client.services.display import FLUSH_SECONDS, OWN, Display, formed
from tandem_client.services.lines import line_writer
from tandem_client.services.phases import Phase
from tandem_client.services.programs import PROGRAMS
from tandem_client.services.settings import (
    GATEWAY,
    SCHEDULER,
    WORKER,
    HelpAsked,
    Settings,
    SettingsReader,
    SettingsRefused,
    flag_of,
    flags,
)
from tandem_contract import stopping
from tandem_contract.files import own_runtime_dir
from tandem_contract.logs import LogFormat, as_json
from tandem_contract.needed import ends_with_needed

# Whether the KV pool of a worker outlives it.
SharedPool = Literal["auto", "on", "off"]
# Each takes the memory of another model.
MAX_STANDBYS = 8

_HTTP_HOST, _HTTP_PORT = "127.0.0.1", 8000
# Says in brackets whether shared memory gets huge pages.
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_LOG_NAME, _LOG_FORMAT = "serve.log", "TANDEM_LOG_FORMAT"

_MODEL, _LIMITS, _ADDRESSES, _CALLERS, _RUN = "Model and memory", "Limits", "Addresses", "Who may call", "Run"
# It keeps the KV pools of dead workers.
_HOLDER = "holder"
_SHARED = f"{SCHEDULER} {WORKER} {_HOLDER}"
_MODEL_ARGUMENT = typer.Argument(help="A folder or a hub name; default: the bundled toy model.")


def _row(programs: str, panel: str, usage: str, description: str, kind: Any = str) -> tuple[list[str], Parameter]:
    """A setting of these programs that is a flag of this command, too, by its own name. They check its value."""
    return programs.split(), flag(panel, kind, usage, description)


_TABLE = (
    ([WORKER], parameter("model", Annotated[str | None, _MODEL_ARGUMENT])),
    _row(WORKER, _MODEL, "--served-name NAME", "Name that callers see; default: the model's own."),
    _row(WORKER, _MODEL, "--device", "cpu, cuda or cuda:N; default: CUDA if there is one."),
    _row(WORKER, _MODEL, "--dtype", "float32, bfloat16 or float16; default: the device decides."),
    _row(WORKER, _MODEL, "--ranks N", "Processes that share the model, one per device: tensor parallel; default: 1."),
    _row(WORKER, _MODEL, "--threads N", "CPU threads of an operation; default: measured at the start."),
    _row(WORKER, _MODEL, "--pool-bytes SIZE", "Size of the KV pool, such as 4GiB; default: for --max-rows sequences."),
    _row(WORKER, _MODEL, "--keep-free-bytes SIZE", "Memory that the KV pool leaves free, instead of its size."),
    _row(WORKER, _LIMITS, "--max-length N", "Tokens of one sequence, prompt included; default: the model's."),
    _row(WORKER, _LIMITS, "--max-rows N", "Sequences that run at once; default: 32 on a CPU, 256 on a GPU."),
    _row(SCHEDULER, _LIMITS, "--default-max-new-tokens N", "Output tokens of a request that does not set its own."),
    _row(SCHEDULER, _LIMITS, "--max-waiting N", "Requests that may wait in the queue; default: 1,024."),
    _row(SCHEDULER, _LIMITS, "--frontends N", "Processes that share the address of the gRPC API; default: 1."),
    _row(SCHEDULER, _ADDRESSES, "--listen HOST:PORT", f"Address of the gRPC API; default: {DEFAULT_ADDRESS}."),
    _row(SCHEDULER, _ADDRESSES, "--metrics-listen HOST:PORT", "Address of the Prometheus page /metrics."),
    _row(SCHEDULER, _ADDRESSES, "--health-listen HOST:PORT", "Second address for health alone, in plaintext."),
    _row(SCHEDULER, _CALLERS, "--tokens FILE", "Tenants and hashes of their tokens."),
    _row(SCHEDULER, _CALLERS, "--tls-cert FILE", "Certificate chain, PEM: TLS, of the HTTP API too."),
    _row(SCHEDULER, _CALLERS, "--tls-key FILE", "Key of --tls-cert, PEM."),
    _row(SCHEDULER, _CALLERS, "--tls-client-ca FILE", "Clients need a certificate of this authority."),
    _row(SCHEDULER, _RUN, "--journal DIR", "Folder of a journal: streams with resume survive the scheduler's death."),
    _row(SCHEDULER, _RUN, "--weights-folders DIR[,DIR]", "Workers may load new weights from here."),
    _row(
        WORKER, _RUN, "--shared-pool",
        "Keep the KV pool of a worker when it dies; auto, the default: with --standby, and on a CPU where shared memory"
        " has huge pages.",
        SharedPool,
    ),
    _row(_SHARED, _RUN, "--runtime-dir DIR", "Folder of the sockets of the service, and of its log."),
    _row(f"{SCHEDULER} {WORKER} {GATEWAY}", _RUN, "--log-level LEVEL", "Lowest level that is logged; default: info."),
    _row(f"{_SHARED} {GATEWAY}", _RUN, "--log-format FORMAT", "text, or json for one object per line; default: text."),
)  # fmt: skip
_PARAMETERS = (
    *(setting for _, setting in _TABLE),
    flag(_ADDRESSES, int, "--port N", f"Port of OpenAI's HTTP API; with --host {_HTTP_PORT}.", min=0, max=65_535),
    flag(_ADDRESSES, str, "--host HOST", f"Host of the HTTP API; with --port {_HTTP_HOST}. Without both: none."),
    flag(_ADDRESSES, str, "--http HOST:PORT", "Both in one."),
    flag(_RUN, int, "--standby N", "Warm workers that wait until the serving one dies.", 0, min=0, max=MAX_STANDBYS),
    flag(_RUN, str, "--scheduler FLAGS", 'More of the scheduler: "--max-streams 64"; --scheduler --help lists them.'),
    flag(_RUN, str, "--worker FLAGS", 'More of the worker: "--page-size 64"; --worker --help lists them.'),
    flag(_RUN, str, "--gateway FLAGS", 'More of the HTTP API: "--processes 4"; --gateway --help lists them.'),
    flag(_RUN, bool, "--verbose -v", "Show the log on a terminal, too, instead of the phases of the start.", False),
)  # fmt: skip


@takes(_PARAMETERS)
@ends_with_needed("tandem serve")
def serve(*, standby: int, verbose: bool, **options: Any) -> None:
    """Run the scheduler service and a worker until Ctrl-C, and restart them when they die."""
    stopping.begin()
    # Until programs start, Ctrl-C ends the command with a word.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    require_programs(PROGRAMS, "tandem serve")
    try:
        more = {name: _words(name, options.pop(name) or "") for name in (SCHEDULER, WORKER, GATEWAY)}
        listen = _http_address(options["port"], options["host"], options["http"], more[GATEWAY])
        _refuse_conflicts(options, more)
    except ValueError as error:
        raise fail(str(error), Exit.USAGE) from None
    chosen = options["log_format"] or os.environ.get(_LOG_FORMAT)
    log_format = cast(LogFormat, chosen) if chosen in get_args(LogFormat) else None
    # The user's own flags come last, so that they count.
    given = {name: [*_flags(options, name), *more.get(name, ())] for name in (SCHEDULER, WORKER, _HOLDER)}
    if listen:
        given[GATEWAY] = [f"--listen={listen}", *_flags(options, GATEWAY), *more[GATEWAY]]
    says, display = "", None
    try:
        # It is a fork, and the display has a thread.
        reader = SettingsReader(SCHEDULER, WORKER, *([GATEWAY] if listen else []))
        display = _display(log_format, verbose=verbose)
        code, cause = _serve(given, reader, display, standbys=standby)
    except HelpAsked as asked:
        code, cause, says = 0, "", str(asked)
    except KeyboardInterrupt:
        code, cause = Exit.INTERRUPTED, "interrupted before anything has started"
        # An interrupt that met the exec of a text, as dataclasses make, ends a process by SIGINT although it was
        # handled, unless another exec of a text has ended since (CPython's `unhandled_keyboard_interrupt`).
        exec("")
    if display is not None:
        display.close()
    if says:
        print(says)
        return
    _tell(cause, log_format)
    raise typer.Exit(code)


def _words(program: str, quoted: str) -> list[str]:
    try:
        return shlex.split(quoted)
    except ValueError as error:
        raise ValueError(f"--{program} is {quoted}: {str(error).lower()}") from None


def _http_address(port: int | None, host: str | None, http: str | None, gateway: Sequence[str]) -> str:
    """Where the HTTP API listens; empty without it. Raises ValueError."""
    given = {"--http": http, "--port": port, "--host": host}
    named = [f"{name} is {value}" for name, value in given.items() if value is not None]
    if not named:
        if gateway:
            raise ValueError("--gateway needs --port, the port of the HTTP API")
        return ""
    others = [f"--gateway has {word}" for word in _of_setting("--listen", gateway)]
    if others or (http is not None and len(named) > 1):
        raise ValueError(f"{' and '.join([*named, *others])}; leave all but one out")
    host = host or _HTTP_HOST
    return http or f"{f'[{host}]' if ':' in host and '[' not in host else host}:{_HTTP_PORT if port is None else port}"


def _refuse_conflicts(options: Mapping[str, Any], more: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError if a flag and the quoted flags of a program set the same."""
    for names, setting in _TABLE:
        value, own = options[setting.name], flag_of(setting.name)
        words = [(name, word) for name in names for word in _of_setting(own, more.get(name, ()))]
        if value is not None and words:
            shown = "MODEL" if setting.name == "model" else own
            raise ValueError(f"{shown} is {value} and --{words[0][0]} has {words[0][1]}; leave one of them out")


def _of_setting(own: str, words: Sequence[str]) -> list[str]:
    """The words that are the flag `own` of a setting, or turn it off."""
    return [word for word in words if word.partition("=")[0] in (own, f"--no-{own[2:]}")]


def _flags(options: Mapping[str, Any], program: str) -> list[str]:
    """The flags of a program for its settings that are flags of this command."""
    return flags(**{setting.name: options[setting.name] for names, setting in _TABLE if program in names})


def _display(log_format: LogFormat | None, *, verbose: bool) -> Display:
    out = sys.stdout
    if not verbose and log_format != "json" and out is not None and out.isatty() and os.environ.get("TERM") != "dumb":
        # It takes some time to import, which a log need not.
        from tandem_client.services.screen import Screen

        return Screen(line_writer(out), out.encoding)
    return Display(line_writer(out, own_line=lambda line: formed(OWN, line, log_format)), log_format)


def _tell(cause: str, log_format: LogFormat | None) -> None:
    # Standard error may be as blocked as standard output was.
    errors = line_writer(sys.stderr)
    for text in cause.splitlines():
        line = f"error: {text}"
        errors.write(as_json(OWN, line, level="ERROR") if log_format == "json" else line)
    errors.close(FLUSH_SECONDS)


def _serve(given: dict[str, list[str]], reader: SettingsReader, display: Display, *, standbys: int) -> tuple[int, str]:
    """Checks the settings of all programs, and serves. Returns the exit code, and the cause or an empty text.

    `given` are the flags by program; without those of the gateway, none is started. Raises HelpAsked.
    """
    try:
        with reader:
            # It gets ready while these modules are imported.
            from tandem_client.services import gateway, serving

            settings = reader.read({name: given[name] for name in (SCHEDULER, WORKER)})
            if GATEWAY in given:
                service = gateway.gateway_flags(settings[SCHEDULER], settings[SCHEDULER]["listen"])
                settings |= reader.read({GATEWAY: [*service, *given[GATEWAY]]})
        folder = Path(settings[SCHEDULER]["runtime_dir"])
        own_runtime_dir(folder)
    except (SettingsRefused, ValueError, OSError) as error:
        display.fail()
        return Exit.USAGE, str(error)
    display.end_phase(Phase.SETTINGS)
    display.log_to(folder / _LOG_NAME)
    holds_pools = _holds_pools(settings[WORKER], standbys)
    if not holds_pools and settings[WORKER]["shared_pool"] != "off":
        # A holder that another program runs would be found.
        given[WORKER].append("--shared-pool=off")
    holder = given.pop(_HOLDER)
    return serving.run(given, settings, display, standbys=standbys, holder_flags=holder if holds_pools else None)


def _holds_pools(worker: Settings, num_standbys: int) -> bool:
    """Whether the KV pool is in memory that a holder keeps.

    It costs something: on a CPU decode steps take some 10 % longer where shared memory has no huge pages, and a GPU has
    a smaller pool.
    """
    if worker["shared_pool"] != "auto":
        return worker["shared_pool"] == "on"
    if sys.platform != "linux":
        return False
    return num_standbys > 0 or (not worker["device"].startswith("cuda") and _shared_memory_has_huge_pages())


def _shared_memory_has_huge_pages() -> bool:
    try:
        chosen = _HUGE_PAGES.read_text()
    except OSError:
        return False
    return "[never]" not in chosen and "[deny]" not in chosen
