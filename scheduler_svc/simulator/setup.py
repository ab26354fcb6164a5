"""From flags to what is simulated: the cost model, what the workers offer, the workload.

Owns the checks that take several flags together, and how many pages a machine's memory holds.
"""

import argparse
import math

from scheduler_svc.core.messages.config import CoreConfig, Policy
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.simulator.cost.fitted import FittedCost, fit, read_steps
from scheduler_svc.simulator.cost.hardware import machine_named, model_named
from scheduler_svc.simulator.cost.roofline import Roofline
from scheduler_svc.simulator.simulation import Setup
from scheduler_svc.simulator.workload.request_source import Workload, WorkloadError
from scheduler_svc.simulator.workload.synthetic import Synthetic
from scheduler_svc.simulator.workload.tokens import eos_of
from scheduler_svc.simulator.workload.traces import BLOCK_TOKENS, read_trace

_MEMORY_SHARE = 0.9
_SYNTHETIC_REQUESTS, _SYNTHETIC_RATE = 1_000, 1.0
# No virtual worker is ever lost.
_PATIENCE_SECONDS = 1e15


class SetupError(ValueError):
    """Flags that do not go together; the message names them."""


def workload_of(args: argparse.Namespace) -> Workload:
    """Raises OSError, WorkloadError."""
    if args.trace is None:
        return Synthetic(
            num_requests=args.requests or _SYNTHETIC_REQUESTS,
            own_rate=args.rate or _SYNTHETIC_RATE,
            inputs=args.input,
            outputs=args.output,
            spacing=args.arrivals,
            burstiness=args.burstiness,
            prefix_groups=args.prefix_groups,
            prefix_tokens=args.prefix_tokens,
            num_tenants=args.tenants,
            greedy_share=args.greedy_share,
            seed=args.seed,
        )
    trace = read_trace(args.trace, args.trace_format, args.requests)
    if len(trace.blocks) and args.prefix_sharing and BLOCK_TOKENS % args.page_size:
        raise WorkloadError(
            f"--page-size is {args.page_size}; a trace with blocks of {BLOCK_TOKENS} tokens needs a divisor of that"
        )
    return trace


def setup_of(args: argparse.Namespace) -> Setup:
    """Raises OSError, SetupError and what the parts raise: all of them ValueErrors."""
    model, machine = model_named(args.model), machine_named(args.machine)
    if args.token_budget < args.max_rows + args.chunk_align:
        raise SetupError(
            f"--token-budget is {args.token_budget}; --max-rows {args.max_rows} and one chunk of {args.chunk_align} "
            f"need {args.max_rows + args.chunk_align}"
        )
    roofline = Roofline(
        machine=machine,
        model=model,
        page_size=args.page_size,
        devices=args.devices,
        value_bytes=args.value_bytes,
        flops_efficiency=args.flops_efficiency,
        bandwidth_efficiency=args.bandwidth_efficiency,
        overhead_seconds=args.overhead_us * 1e-6,
    )
    fitted, recorded_pages = _fitted(args, roofline)
    num_pages = args.num_pages or recorded_pages or _pages(roofline)
    cost = fitted or roofline
    max_length = args.max_length or model.max_length
    info = WorkerInfo(
        identity="simulated",
        model=model.name,
        vocab_size=model.vocab_size,
        page_size=args.page_size,
        num_pages=num_pages,
        max_rows=args.max_rows,
        max_length=max_length,
        token_budget=args.token_budget,
        chunk_align=args.chunk_align,
        logit_rows=args.max_rows + args.chunk_align,
        eos_token_ids=(eos_of(model.vocab_size),),
        pid=1,
        window=model.window if model.slides and model.window < max_length else 0,
        host_pages=args.host_pages,
        page_copy_us=cost.page_copy_us(),
        token_us=cost.token_us(),
    )
    return Setup(
        config=_config(args),
        info=info,
        cost=cost,
        workers=args.workers,
        link_seconds=args.link_us * 1e-6,
        # A CPU computes what it is given; elsewhere a step's tokens are padded as the worker pads them.
        token_multiple=1 if machine.name == "cpu" else args.chunk_align,
        ask_tokens=args.max_new_tokens,
        shares_prefixes=args.prefix_sharing,
    )


def _fitted(args: argparse.Namespace, roofline: Roofline) -> tuple[FittedCost | None, int]:
    """The fit and the pages of the pool that it was recorded with, the reserved one included."""
    if args.fit is None:
        return None, 0
    recorded = read_steps(args.fit)
    return fit(recorded, page_size=args.page_size, copy_us=roofline.page_copy_us()), recorded.pages_total + 1


def _pages(roofline: Roofline) -> int:
    pages = roofline.pages_in(_MEMORY_SHARE)
    if pages < 2:
        need = math.ceil(roofline.weight_bytes / (_MEMORY_SHARE * roofline.machine.memory))
        raise SetupError(
            f"{roofline.name}: weights of {roofline.weight_bytes / 1e9:.1f} GB leave no page in {_MEMORY_SHARE:.0%} of "
            f"{roofline.devices * roofline.machine.memory / 1e9:.0f} GB; --devices {max(need, roofline.devices + 1)} "
            "or --value-bytes 1 may do"
        )
    return pages


def _config(args: argparse.Namespace) -> CoreConfig:
    policy = Policy(
        mixed_steps=args.mixed_steps,
        admission=args.admission,
        cache_aware=args.cache_aware,
        fair_share=args.fair_share,
    )
    return CoreConfig(
        max_waiting=args.max_waiting,
        max_waiting_tokens=args.max_waiting_tokens or CoreConfig().max_waiting_tokens,
        plans_in_flight=args.plans_in_flight,
        step_timeout_seconds=_PATIENCE_SECONDS,
        silence_timeout_seconds=_PATIENCE_SECONDS,
        report_steps=args.steps is not None,
        policy=policy,
    )
