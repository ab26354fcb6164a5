"""The options of `tandem simulate`: names, defaults, bounds and help; the simulation that is built from them.

The switches of the core's policy come from the fields of `Policy`, so a new policy needs no line here.

Owns the checks that involve several options, and how many pages a machine's memory holds.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from scheduler_svc.core.messages.config import MAX_LANES, CoreConfig, Policy
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.simulator.cost import FittedCost, Roofline, fit, read_steps
from scheduler_svc.simulator.hardware import MACHINES, MODELS, Model
from scheduler_svc.simulator.simulation import Setup
from scheduler_svc.simulator.traces import BLOCK_TOKENS, Trace, TraceFormat, read_trace
from scheduler_svc.simulator.workload import (
    GRAMMAR,
    Lengths,
    Spacing,
    Spread,
    Synthetic,
    eos_of,
    parse_lengths,
)
from tandem_contract.plural import numbered
from tandem_contract.settings import Program, file, number, one_of

PROGRAM = "tandem simulate"
_DESCRIPTION = """\
Runs the scheduler's real core on virtual time, with a cost model in place of the worker, and predicts latency,
throughput, memory use and wasted work. Requests come from a trace or are drawn at random. With --memory LAYOUT the
command compares layouts of the KV cache instead: tandem simulate --memory paged --help."""
_MANY = 100_000_000
_DEFAULTS = CoreConfig()
# The defaults of a field are values, those of the command line are text.
_Lengths = Annotated[Lengths, BeforeValidator(lambda value: parse_lengths(value) if isinstance(value, str) else value)]


def _values(default: object) -> Sequence[object]:
    """Returns the values of a switch, its default first."""
    kinds = cast("Sequence[object]", (True, False) if isinstance(default, bool) else type(default))
    return sorted(kinds, key=lambda value: value != default)


COMPARABLE: Mapping[str, Sequence[object]] = {
    **{field.name.replace("_", "-"): _values(field.default) for field in fields(Policy)},
    "prefix-sharing": (True, False),
    "spread": tuple(Spread),
}
"""The policies that --compare takes, and their values."""


class RequestOptions(BaseModel):
    """Which requests arrive, and when."""

    trace: Path | None = file("Mooncake's JSON lines or Azure's CSV; default: synthetic")
    trace_format: TraceFormat | None = Field(None, description="default: detected from the first line of the trace")
    requests: int | None = number(None, 1, _MANY, "N", "first N requests of the trace (default: all); synthetic: 1,000")
    rate: float | None = number(None, 1e-6, 1e9, "R", "mean requests per second; default: the trace's; synthetic: 1")
    concurrency: int | None = number(None, 1, 1_000_000, "N", "ignore arrival times; submit when fewer than N are live")
    arrivals: Spacing = Field(Spacing.POISSON, description="synthetic: distribution of the gaps between arrivals")
    burstiness: float = number(3.0, 0.1, 100, "CV", "bursty: standard deviation of the gaps divided by their mean")
    input: _Lengths = Field(
        parse_lengths("lognormal:512:0.8"), title="LENGTHS", description=f"synthetic: prompt tokens: {GRAMMAR}"
    )
    output: _Lengths = Field(
        parse_lengths("lognormal:128:0.8"), title="LENGTHS", description="synthetic: output tokens, in the same forms"
    )
    prefix_groups: int = number(0, 0, 1_000_000, "N", "synthetic: put one of N shared prefixes before each prompt")
    prefix_tokens: int = number(1024, 0, 1_000_000, "N", "length of such a prefix")
    tenants: int = number(1, 1, 100_000, "N", "synthetic: N tenants, which share no pages with each other")
    greedy_share: float = number(0.0, 0, 1, "SHARE", "share of requests that the first tenant sends; 0: an equal share")
    max_new_tokens: int = number(
        2048, 0, 1_000_000, "N", "requested limit; EOS ends the output before; 0: request exactly the output's length"
    )
    seed: int = number(0, 0, 1 << 62, "N", "seed of all random draws")


class WorkerOptions(BaseModel):
    """The machine, the model and the workers."""

    machine: Annotated[str, one_of(MACHINES)] = Field("h100", title="NAME", description=", ".join(MACHINES))
    model: Annotated[str, one_of(MODELS)] = Field("llama-3.1-8b", title="NAME", description=", ".join(MODELS))
    ranks: int = number(1, 1, 64, "N", "devices of one worker, tensor parallel")
    rank_link_us: float = number(
        10.0, 0, 1e6, "US", "several ranks: latency of a collective; a step has 2 per layer and 3 more"
    )
    rank_link_gbps: float | None = number(
        None, 1e-3, 1e6, "GBPS", "several ranks: 10^9 bit/s between two, one way; default: the machine's link to a peer"
    )
    workers: int = number(1, 1, MAX_LANES, "N", "identical workers")
    cells: int = number(1, 1, 256, "N", "services, each with a core and workers of its own")
    cell_lanes: int | None = number(None, 1, MAX_LANES, "N", "workers of each service; default: --workers")
    spread: Spread = Field(
        Spread.HASH, description="several services: a request goes to one by the hash of its beginning"
    )
    core_us: float = number(0.0, 0, 1e6, "US", "time of a core for each request and for each step of a worker")
    frontends: int | None = number(None, 1, 256, "N", "front ends of each service; default: they take no time")
    frontend_us: float = number(60.0, 0, 1e6, "US", "with --frontends: CPU for each message to a caller")
    frontend_request_us: float = number(1400.0, 0, 1e6, "US", "with --frontends: CPU for each request")
    kill_lane_every: float = number(0.0, 0, 1e9, "SECONDS", "kill a worker each time; 0: none")
    restart: float = number(10.0, 0, 1e9, "SECONDS", "time after which a killed worker joins again")
    value_bytes: int = number(2, 1, 4, "N", "bytes per weight and cache entry")
    fit: Path | None = file("fit step times to a file of the service's --steps; default: a roofline")
    page_size: int = number(128, 1, 1024, "N", "tokens per page")
    num_pages: int | None = number(
        None, 2, 1 << 30, "N", "pages per worker; default: what fits in 90 % of the memory beside the weights"
    )
    host_pages: int = number(0, 0, 1 << 30, "N", "pages in host memory")
    max_rows: int = number(256, 1, 65536, "N", "sequences that run at once")
    max_length: int | None = number(None, 2, 10_000_000, "N", "default: the model's")
    token_budget: int = number(4096, 1, 1 << 20, "N", "tokens per step")
    chunk_align: int = number(128, 1, 4096, "N", "tokens that a prompt chunk is padded to")
    flops_efficiency: float = number(0.6, 0.01, 1, "SHARE", "share of the peak FLOP/s reached")
    bandwidth_efficiency: float = number(0.8, 0.01, 1, "SHARE", "share of the peak bandwidth reached")
    overhead_us: float = number(500.0, 0, 1e9, "US", "fixed time per step")
    link_us: float = number(100.0, 0, 1e9, "US", "delay between core and worker, each way")


class CoreOptions(BaseModel):
    """The core. The switches of `Policy` join these in `read`."""

    prefix_sharing: bool = Field(True, description="requests share pages of equal prompts")
    plans_in_flight: int = number(_DEFAULTS.plans_in_flight, 1, 8, "N", "plans sent before the first one's result")
    max_waiting: int = number(_DEFAULTS.max_waiting, 1, _MANY, "N", "waiting requests; more are rejected")
    max_waiting_tokens: int = number(_DEFAULTS.max_waiting_tokens, 1, 1 << 40, "N", "tokens of all waiting requests")

    @property
    def policy(self) -> Policy:
        """The policy that the switches describe."""
        return Policy(**{field.name: getattr(self, field.name) for field in fields(Policy)})


class OutputOptions(BaseModel):
    """What to find out."""

    as_json: bool = Field(False, alias="json", description="print one JSON object in place of the table")
    steps: Path | None = file("write one line per step, for tandem plot")
    compare: Annotated[str | None, one_of(COMPARABLE)] = Field(
        None, title="POLICY", description="run the same requests under each value of one policy, side by side"
    )
    find_rate: bool = Field(False, description="find how many requests per second keep TTFT p99 below --ttft-p99")
    ttft_p99: float | None = number(None, 1e-6, 1e6, "SECONDS", "the goal of --find-rate")
    precision: float = number(0.05, 0.001, 1, "SHARE", "largest gap between the rate that holds and one that fails")
    probes: int = number(16, 1, 100, "N", "most simulations that --find-rate may run")
    write_trace: Path | None = file("only write a synthetic trace in Mooncake's format")


class Options(OutputOptions, CoreOptions, WorkerOptions, RequestOptions):
    """Every option of the simulator."""

    model_config = ConfigDict(frozen=True)

    def variants(self) -> Iterator[tuple[str, "Options"]]:
        """Yields a name and the options of each run that --compare asks for; without it these options, and no name."""
        name = self.compare
        if name is None:
            yield "", self
            return
        for value in COMPARABLE[name]:
            label = (name if value else f"no {name}") if isinstance(value, bool) else str(value)
            yield label, self.model_copy(update={name.replace("-", "_"): value})


def _phrase(words: str) -> str:
    """Returns a docstring as a phrase for --help."""
    return words[:1].lower() + " ".join(words[1:].split()).rstrip(".")


def read(arguments: Sequence[str]) -> Options:
    """Returns the options that the arguments name. Raises SettingError."""
    # The docstring behind each field.
    words = dict(re.findall(r'(?ms)^    (\w+): [^\n]*\n    """(.*?)"""', inspect.getsource(Policy)))
    switches: dict[str, Any] = {
        field.name: (
            field.type,
            Field(field.default, description=_phrase(words.get(field.name) or cast(type, field.type).__doc__ or "")),
        )
        for field in fields(Policy)
    }
    model = create_model("Options", __base__=Options, **switches)
    groups = {
        "requests": RequestOptions.model_fields,
        "machine and model": WorkerOptions.model_fields,
        "core": [*switches, *CoreOptions.model_fields],
        "output": [field.alias or name for name, field in OutputOptions.model_fields.items()],
    }
    return Program(command=PROGRAM, model=model, description=_DESCRIPTION, groups=groups).read(arguments, {})


_MEMORY_SHARE = 0.9
_SYNTHETIC_REQUESTS, _SYNTHETIC_RATE = 1_000, 1.0
# So long that no virtual worker times out.
_TIMEOUT_SECONDS = 1e15


_Filled = TypeVar("_Filled")


Workload = Synthetic | Trace
"""Requests in the order of their arrival."""


def workload_of(options: Options) -> Workload:
    """Returns the requests to simulate. Raises OSError and ValueError."""
    if options.trace is None:
        return _filled(
            Synthetic,
            options,
            num_requests=options.requests or _SYNTHETIC_REQUESTS,
            own_rate=options.rate or _SYNTHETIC_RATE,
            inputs=options.input,
            outputs=options.output,
            spacing=options.arrivals,
            num_tenants=options.tenants,
        )
    trace = read_trace(options.trace, options.trace_format, options.requests)
    if len(trace.blocks) and options.prefix_sharing and BLOCK_TOKENS % options.page_size:
        raise ValueError(
            f"--page-size is {options.page_size}; it must divide {BLOCK_TOKENS}, the tokens of a block of the trace"
        )
    return trace


def setup_of(options: Options) -> Setup:
    """Returns what serves them. Raises OSError, and ValueError if options do not fit together."""
    model, machine = MODELS[options.model], MACHINES[options.machine]
    if options.token_budget < options.max_rows + options.chunk_align:
        raise ValueError(
            f"--token-budget is {options.token_budget}; --max-rows {options.max_rows} and one chunk of "
            f"{options.chunk_align} need {options.max_rows + options.chunk_align}"
        )
    _check_group(options, model)
    roofline = _filled(Roofline, options, machine=machine, model=model)
    fitted, recorded_pages = _fitted(options, roofline)
    num_pages = options.num_pages or recorded_pages or _pages(roofline)
    cost = fitted or roofline
    max_length = options.max_length or model.max_length
    info = _filled(
        WorkerInfo,
        options,
        identity="simulated",
        model=model.name,
        vocab_size=model.vocab_size,
        num_pages=num_pages,
        max_length=max_length,
        logit_rows=options.max_rows + options.chunk_align,
        eos_token_ids=(eos_of(model.vocab_size),),
        pid=1,
        window=model.window if model.slides and model.window < max_length else 0,
        page_copy_us=cost.page_copy_us(),
        token_us=cost.token_us(),
    )
    config = _filled(
        CoreConfig,
        options,
        step_timeout_seconds=_TIMEOUT_SECONDS,
        silence_timeout_seconds=_TIMEOUT_SECONDS,
        report_steps=options.steps is not None,
        policy=options.policy,
    )
    return _filled(
        Setup,
        options,
        config=config,
        info=info,
        cost=cost,
        workers=options.cell_lanes or options.workers,
        core_seconds=options.core_us * 1e-6,
        front_ends=options.frontends or 0,
        message_seconds=options.frontend_us * 1e-6,
        request_seconds=options.frontend_request_us * 1e-6,
        kill_seconds=options.kill_lane_every,
        restart_seconds=options.restart,
        link_seconds=options.link_us * 1e-6,
        # The worker pads a step's tokens, except on a CPU.
        token_multiple=1 if machine.name == "cpu" else options.chunk_align,
        ask_tokens=options.max_new_tokens,
        shares_prefixes=options.prefix_sharing,
    )


def _check_group(options: Options, model: Model) -> None:
    """Raises ValueError for a worker of several ranks that cannot be simulated."""
    if options.ranks > 1 and options.fit is not None:
        raise ValueError(f"--ranks is {options.ranks}; with --fit the steps of the file are those of a whole worker")
    if model.heads % options.ranks:
        raise ValueError(
            f"--ranks is {options.ranks}; it must divide the {numbered(model.heads, 'attention head')} "
            f"of {model.name}, such as "
            f"{_divisor(model.heads, options.ranks)}"
        )


def _divisor(number: int, least: int) -> int:
    """Returns the smallest divisor that is at least `least`, or the number itself."""
    return next((divisor for divisor in range(least, number) if number % divisor == 0), number)


def _filled(kind: type[_Filled], options: Options, **others: Any) -> _Filled:
    """Returns a dataclass with `others`, and with the options for its other fields of the same names."""
    names = {field.name for field in fields(cast(Any, kind))} & type(options).model_fields.keys()
    make: Callable[..., _Filled] = kind
    return make(**({name: getattr(options, name) for name in names} | others))


def _fitted(options: Options, roofline: Roofline) -> tuple[FittedCost | None, int]:
    """Returns the fit, and the pages of the recorded pool with the reserved page included."""
    if options.fit is None:
        return None, 0
    recorded = read_steps(options.fit)
    return fit(recorded, page_size=options.page_size, copy_us=roofline.page_copy_us()), recorded.pages_total + 1


def _pages(roofline: Roofline) -> int:
    pages = roofline.pages_in(_MEMORY_SHARE)
    if pages < 2:
        need = math.ceil(roofline.weight_bytes / (_MEMORY_SHARE * roofline.machine.memory))
        ranks = _divisor(roofline.model.heads, max(need, roofline.ranks + 1))
        raise ValueError(
            f"{roofline.name}: weights of {roofline.weight_bytes / 1e9:.1f} GB leave no page in {_MEMORY_SHARE:.0%} of "
            f"{roofline.ranks * roofline.machine.memory / 1e9:.0f} GB; --ranks {ranks} or --value-bytes 1 may help"
        )
    return pages
