"""Builds the simulation from the options: the cost model, the worker's info, the core's config and the workload.

Owns the checks that involve several options, and how many pages a machine's memory holds.
"""

import math

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.simulator.cost.fitted import FittedCost, fit, read_steps
from scheduler_svc.simulator.cost.hardware import machine_named, model_named
from scheduler_svc.simulator.cost.roofline import Roofline
from scheduler_svc.simulator.options import Options
from scheduler_svc.simulator.simulation import Setup
from scheduler_svc.simulator.workload.request_source import Workload, WorkloadError
from scheduler_svc.simulator.workload.synthetic import Synthetic
from scheduler_svc.simulator.workload.tokens import eos_of
from scheduler_svc.simulator.workload.traces import BLOCK_TOKENS, read_trace

_MEMORY_SHARE = 0.9
_SYNTHETIC_REQUESTS, _SYNTHETIC_RATE = 1_000, 1.0
# So long that no virtual worker times out.
_TIMEOUT_SECONDS = 1e15


class SetupError(ValueError):
    """Options that do not fit together. The message names them."""


def workload_of(options: Options) -> Workload:
    """Returns the requests to simulate. Raises OSError and WorkloadError."""
    if options.trace is None:
        return Synthetic(
            num_requests=options.requests or _SYNTHETIC_REQUESTS,
            own_rate=options.rate or _SYNTHETIC_RATE,
            inputs=options.input,
            outputs=options.output,
            spacing=options.arrivals,
            burstiness=options.burstiness,
            prefix_groups=options.prefix_groups,
            prefix_tokens=options.prefix_tokens,
            num_tenants=options.tenants,
            greedy_share=options.greedy_share,
            seed=options.seed,
        )
    trace = read_trace(options.trace, options.trace_format, options.requests)
    if len(trace.blocks) and options.prefix_sharing and BLOCK_TOKENS % options.page_size:
        raise WorkloadError(
            f"--page-size is {options.page_size}; it must divide {BLOCK_TOKENS}, the tokens of a block of the trace"
        )
    return trace


def setup_of(options: Options) -> Setup:
    """Returns what serves them. Raises OSError, and SetupError and other kinds of ValueError."""
    model, machine = model_named(options.model), machine_named(options.machine)
    if options.token_budget < options.max_rows + options.chunk_align:
        raise SetupError(
            f"--token-budget is {options.token_budget}; --max-rows {options.max_rows} and one chunk of "
            f"{options.chunk_align} need {options.max_rows + options.chunk_align}"
        )
    roofline = Roofline(
        machine=machine,
        model=model,
        page_size=options.page_size,
        devices=options.devices,
        value_bytes=options.value_bytes,
        flops_efficiency=options.flops_efficiency,
        bandwidth_efficiency=options.bandwidth_efficiency,
        overhead_seconds=options.overhead_us * 1e-6,
    )
    fitted, recorded_pages = _fitted(options, roofline)
    num_pages = options.num_pages or recorded_pages or _pages(roofline)
    cost = fitted or roofline
    max_length = options.max_length or model.max_length
    info = WorkerInfo(
        identity="simulated",
        model=model.name,
        vocab_size=model.vocab_size,
        page_size=options.page_size,
        num_pages=num_pages,
        max_rows=options.max_rows,
        max_length=max_length,
        token_budget=options.token_budget,
        chunk_align=options.chunk_align,
        logit_rows=options.max_rows + options.chunk_align,
        eos_token_ids=(eos_of(model.vocab_size),),
        pid=1,
        window=model.window if model.slides and model.window < max_length else 0,
        host_pages=options.host_pages,
        page_copy_us=cost.page_copy_us(),
        token_us=cost.token_us(),
    )
    return Setup(
        config=_config(options),
        info=info,
        cost=cost,
        workers=options.workers,
        link_seconds=options.link_us * 1e-6,
        # The worker pads a step's tokens, except on a CPU.
        token_multiple=1 if machine.name == "cpu" else options.chunk_align,
        ask_tokens=options.max_new_tokens,
        shares_prefixes=options.prefix_sharing,
    )


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
        raise SetupError(
            f"{roofline.name}: weights of {roofline.weight_bytes / 1e9:.1f} GB leave no page in {_MEMORY_SHARE:.0%} of "
            f"{roofline.devices * roofline.machine.memory / 1e9:.0f} GB; --devices {max(need, roofline.devices + 1)} "
            "or --value-bytes 1 may help"
        )
    return pages


def _config(options: Options) -> CoreConfig:
    return CoreConfig(
        max_waiting=options.max_waiting,
        max_waiting_tokens=options.max_waiting_tokens,
        plans_in_flight=options.plans_in_flight,
        step_timeout_seconds=_TIMEOUT_SECONDS,
        silence_timeout_seconds=_TIMEOUT_SECONDS,
        report_steps=options.steps is not None,
        policy=options.policy,
    )
