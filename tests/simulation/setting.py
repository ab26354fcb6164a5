"""The setting of an episode: sizes, limits, fault shares and what requests have in common. Drawn once, from its seed.

Owns the draws and nothing else.
"""

import random
from dataclasses import dataclass, replace

from scheduler_svc.core.messages.config import Admission, CoreConfig, Policy
from scheduler_svc.core.messages.operators import TenantLimits
from tests.rigs.core_events import WEIGHTS_ROOT
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults

# Prompt tokens that are never sampled: logits after POISON are not finite, a step with KILLER fails, a step with LETHAL
# kills its worker.
POISON, KILLER, LETHAL = 272, 273, 274
_MAX_FAULTY_STEP = 400
# Share of episodes with long outputs in a pool that fits few of them, with host memory: preempted requests must resume.
_CROWDED_SHARE = 0.25
_SHARED_POOL_SHARE = 0.5
_UNSET_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`stems` are common beginnings of prompts, `salts` the tenants' salts; shares are fractions of 1."""

    shape: Shape
    config: CoreConfig
    max_workers: int
    max_new_tokens: tuple[int, ...]
    stems: tuple[tuple[int, ...], ...]
    salts: tuple[str, ...]
    # (""): the service runs without a token file.
    tenants: tuple[str, ...]
    bypass_share: float
    flush_share: float
    # POISON, or in some episodes a token that may be sampled.
    nonfinite_token: int
    failing_share: float
    corrupt_share: float
    poison_share: float
    killer_share: float
    constrained_share: float
    # Share of requests that leave the maximum unset.
    unset_share: float
    # Share of workers that take no constraints.
    without_constraints_share: float
    lethal_share: float
    # Share of workers with memory for fewer positions or rows than they report, and of moves in which one hangs.
    small_memory_share: float
    hang_share: float
    # Whether the memory of a worker's pages outlives it.
    shares_pools: bool


def draw_setting(rng: random.Random, *, crowded: bool | None = None) -> Setting:
    """Draws small pools and vocabularies, so that collisions are frequent."""
    crowded = rng.random() < _CROWDED_SHARE if crowded is None else crowded
    return Setting(
        shape=_draw_shape(rng, crowded),
        config=_draw_config(rng, crowded),
        max_workers=1 if crowded else rng.choice([1, 2, 2, 3]),
        max_new_tokens=(12, 20) if crowded else (1, 1, 2, 3, 5, 8, 12),
        stems=tuple(tuple(rng.randrange(4) for _ in range(rng.randint(2, 24))) for _ in range(rng.randint(1, 4))),
        salts=rng.choice([("",), ("", "a"), ("a", "b", "c")]),
        tenants=rng.choice([("",), ("t1", "t2"), ("t1", "t2", "t3", "t3")]),
        bypass_share=rng.choice([0.0, 0.1, 0.4]),
        flush_share=rng.choice([0.0, 0.3, 1.0]),
        nonfinite_token=rng.choice([POISON, POISON, POISON, 2, 4]),
        failing_share=rng.choice([0.0, 0.0, 0.01, 0.05]),
        corrupt_share=rng.choice([0.0, 0.0, 0.1]),
        poison_share=rng.choice([0.0, 0.05, 0.2]),
        killer_share=rng.choice([0.0, 0.0, 0.03, 0.1]),
        constrained_share=rng.choice([0.0, 0.1, 0.3, 0.6]),
        unset_share=_UNSET_SHARE,
        without_constraints_share=rng.choice([0.0, 0.0, 0.2]),
        lethal_share=rng.choice([0.0, 0.0, 0.03, 0.1]),
        small_memory_share=rng.choice([0.0, 0.0, 0.3, 1.0]),
        hang_share=rng.choice([0.0, 0.0, 0.1, 0.3]),
        shares_pools=rng.random() < _SHARED_POOL_SHARE,
    )


def _draw_shape(rng: random.Random, crowded: bool) -> Shape:
    rows, align = rng.choice([5, 8] if crowded else [1, 2, 3, 4, 5, 8]), rng.choice([1, 1, 2, 4])
    window = 0 if crowded else rng.choice([0, 0, 0, rng.randint(1, 12)])
    host_pages = rng.choice([5, 20, 40] if crowded else [0, 0, 2, 5, 20])
    return Shape(
        page_size=rng.randint(1, 2 if crowded else 4),
        num_pages=rng.choice([20, 30, 42] if crowded else [2, 3, 4, 6, 8, 10, 14, 20, 30, 60]),
        max_rows=rows,
        max_length=40 if crowded else rng.choice([12, 24, 40]),
        chunk_align=align,
        token_budget=rows + align + rng.choice([0, 0, 1, 3, 7, 20]),
        spare_logit_rows=rng.choice([0, 0, 2, 5, 20]),
        vocab_size=280,
        sampled_vocab=rng.choice([5, 8]),
        eos_token_ids=rng.choice([(0,), (0, 1)]),
        window=window,
        sink_tokens=rng.choice([0, 0, 1, 2, 5]) if window else 0,
        host_pages=host_pages,
        # Moving a page usually costs less than computing it again.
        page_copy_us=rng.choice([1.0, 1.0, 1.0, 1000.0]) if host_pages else 0.0,
        token_us=50.0,
    )


def _draw_config(rng: random.Random, crowded: bool) -> CoreConfig:
    # Admission.KNOWN preempts most.
    admissions = [Admission.KNOWN] if crowded else [Admission.HORIZON, Admission.WATERMARK, Admission.KNOWN]
    return CoreConfig(
        max_waiting=rng.choice([2, 6, 20, 70]),
        max_waiting_tokens=rng.choice([20, 60, 1000]),
        plans_in_flight=rng.randint(1, 3),
        step_timeout_seconds=5.0,
        silence_timeout_seconds=3.0,
        max_worker_wait_seconds=rng.choice([2.0, 10.0, 600.0]),
        max_plan_bytes=rng.choice([1, 300, 2000, 1 << 24]),
        prove_workers=rng.random() < 0.6,
        predict_steps=rng.random() < 0.6,
        report_steps=True,
        report_detached=True,
        weights_folders=(WEIGHTS_ROOT,),
        max_kept_requests=rng.choice([0, 2, 1000]),
        page_root=rng.choice(["", "ab" * 16]),
        policy=Policy(
            mixed_steps=rng.random() < 0.8,
            admission=rng.choice(admissions),
            cache_aware=rng.random() < 0.7,
            fair_share=rng.random() < 0.7,
        ),
    )


def draw_worker_shape(rng: random.Random, setting: Setting) -> Shape:
    """Usually the episode's shape, sometimes a smaller one."""
    shape = setting.shape
    if rng.random() < 0.7:
        return shape
    return replace(
        shape,
        num_pages=max(2, shape.num_pages - rng.randint(0, 4)),
        max_rows=max(1, shape.max_rows - rng.randint(0, 2)),
        max_length=shape.max_length - rng.choice([0, 0, 8]),
        host_pages=max(0, shape.host_pages - rng.choice([0, 1, 20])),
    )


def draw_faults(rng: random.Random, setting: Setting) -> Faults:
    """Draws which of a worker's first 400 steps fail."""
    shape, has_small_memory = setting.shape, rng.random() < setting.small_memory_share
    drawn = [step for step in range(1, _MAX_FAULTY_STEP) if rng.random() < setting.failing_share]
    return Faults(
        fail_steps=frozenset(drawn[::3]),
        oom_steps=frozenset(drawn[1::3]),
        out_of_sync_steps=frozenset(drawn[2::3]),
        fail_token=KILLER,
        kill_token=LETHAL,
        nonfinite_token=setting.nonfinite_token,
        # A worker can always run one chunk of one row.
        memory_tokens=rng.randint(shape.chunk_align, shape.token_budget) if has_small_memory else None,
        memory_rows=rng.randint(1, shape.max_rows) if has_small_memory else None,
    )


def draw_limits(rng: random.Random, setting: Setting) -> dict[str, TenantLimits]:
    """Draws the limits of a token file; sometimes a tenant is missing from it."""
    return {
        tenant: TenantLimits(
            requests_per_minute=rng.choice([None, None, 10, 600]),
            tokens_per_minute=rng.choice([None, None, 100, 10_000]),
            queue_share=rng.choice([None, 0.2, 1.0]),
            row_share=rng.choice([None, 0.1, 0.5, 1.0]),
        )
        for tenant in dict.fromkeys(setting.tenants)
        if tenant and rng.random() < 0.9
    }
