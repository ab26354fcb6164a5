"""Builds the simulation from the options: the cost model, the worker's info, the core's config and the workload.

Owns the checks that involve several options, and how many pages a machine's memory holds.
"""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, cast

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.simulator.cost.fitted import FittedCost, fit, read_steps
from scheduler_svc.simulator.cost.hardware import MACHINES, MODELS, Model
from scheduler_svc.simulator.cost.roofline import Roofline
from scheduler_svc.simulator.options import Options
from scheduler_svc.simulator.simulation import Setup
from scheduler_svc.simulator.worker import FrontEndCosts
from scheduler_svc.simulator.workload.request_source import Workload, WorkloadError
from scheduler_svc.simulator.workload.synthetic import Synthetic
from scheduler_svc.simulator.workload.tokens import eos_of
from scheduler_svc.simulator.workload.traces import BLOCK_TOKENS, read_trace

_MEMORY_SHARE = 0.9
_SYNTHETIC_REQUESTS, _SYNTHETIC_RATE = 1_000, 1.0
# So long that no virtual worker times out.
_TIMEOUT_SECONDS = 1e15


_Filled = TypeVar("_Filled")


class SetupError(ValueError):
    """Options that do not fit together. The message names them."""


def workload_of(options: Options) -> Workload:
    """Returns the requests to simulate. Raises OSError and WorkloadError."""
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
        raise WorkloadError(
            f"--page-size is {options.page_size}; it must divide {BLOCK_TOKENS}, the tokens of a block of the trace"
        )
    return trace


def setup_of(options: Options) -> Setup:
    """Returns what serves them. Raises OSError, and SetupError and other kinds of ValueError."""
    model, machine = MODELS[options.model], MACHINES[options.machine]
    if options.token_budget < options.max_rows + options.chunk_align:
        raise SetupError(
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
    return Setup(
        config=config,
        info=info,
        cost=cost,
        workers=options.cell_lanes or options.workers,
        cells=options.cells,
        spread=options.spread,
        core_seconds=options.core_us * 1e-6,
        front_ends=_front_ends(options),
        kill_seconds=options.kill_lane_every,
        restart_seconds=options.restart,
        seed=options.seed,
        link_seconds=options.link_us * 1e-6,
        # The worker pads a step's tokens, except on a CPU.
        token_multiple=1 if machine.name == "cpu" else options.chunk_align,
        ask_tokens=options.max_new_tokens,
        shares_prefixes=options.prefix_sharing,
    )


def _front_ends(options: Options) -> FrontEndCosts | None:
    if options.frontends is None:
        return None
    return FrontEndCosts(
        count=options.frontends,
        message_seconds=options.frontend_us * 1e-6,
        request_seconds=options.frontend_request_us * 1e-6,
    )


def _check_group(options: Options, model: Model) -> None:
    """Raises SetupError for a worker of several ranks that cannot be simulated."""
    if options.ranks > 1 and options.fit is not None:
        raise SetupError(f"--ranks is {options.ranks}; with --fit the steps of the file are those of a whole worker")
    if model.heads % options.ranks:
        raise SetupError(
            f"--ranks is {options.ranks}; it must divide the {model.heads} attention heads of {model.name}, such as "
            f"{_divisor(model.heads, options.ranks)}"
        )


def _divisor(number: int, least: int) -> int:
    """Returns the smallest divisor that is at least `least`, or the number itself."""
    return next((each for each in range(least, number) if number % each == 0), number)


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
        raise SetupError(
            f"{roofline.name}: weights of {roofline.weight_bytes / 1e9:.1f} GB leave no page in {_MEMORY_SHARE:.0%} of "
            f"{roofline.ranks * roofline.machine.memory / 1e9:.0f} GB; --ranks {ranks} or --value-bytes 1 may help"
        )
    return pages
