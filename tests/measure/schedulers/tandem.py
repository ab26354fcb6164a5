"""The measured variants of Tandem's core: steady steps, steps beside a blocked queue, admissions.

Owns the variants and their conditions, which it asserts; `core.py` runs and judges them.
"""

from collections.abc import Iterable

import numpy as np

from tests.measure.schedulers.loaded_core import ADMITTED_TOKENS, MOST_STEPS, NUM_WAITING, LoadedCore, Series

# Free rows of the variants that need some.
_SPARE_ROWS = 16


class Tandem:
    """`run(variant, times)` returns series of microseconds of process CPU time, and of bytes.

    Each variant has a core of its own, so that none depends on another's state.
    """

    variants = ("step", "rows_free", "rows_taken_waiting", "pool_full_waiting", "pool_full_look", "admit")
    note = "a result handled and a plan made, for two processes; every page that fills is indexed"

    def __init__(
        self, num_rows: int, context: int, num_steps: int, *, num_logprobs: int = 0, report_steps: bool = False
    ) -> None:
        def loaded(spare_rows: int = 0, steps: int = num_steps) -> LoadedCore:
            return LoadedCore(
                num_rows,
                context,
                steps,
                spare_rows=spare_rows,
                num_logprobs=num_logprobs,
                report_steps=report_steps,
            )

        self._cores = {
            "step": loaded(),
            "rows_free": loaded(_SPARE_ROWS),
            "rows_taken_waiting": loaded(),
            "pool_full_waiting": loaded(_SPARE_ROWS),
            "pool_full_look": loaded(_SPARE_ROWS),
            "admit": loaded(1, MOST_STEPS),
        }
        self._cores["rows_taken_waiting"].submit_waiting(huge=False)
        self._cores["pool_full_waiting"].submit_waiting(huge=True)
        self._cores["pool_full_look"].submit_waiting(huge=True)

    def run(self, variant: str, times: int) -> Series:
        core = self._cores[variant]
        core.us.clear()
        if variant == "admit":
            return self._admissions(core, times)
        for _ in range(times):
            if variant == "pool_full_look":
                core.change_head()
            core.steady_step()
        load = core.load()
        assert load.waiting == (0 if variant in ("step", "rows_free") else NUM_WAITING)
        assert load.preemptions == 0
        return {**core.us, "step_us": _sums(core.us["done_us"], core.us["tick_us"])}

    def _admissions(self, core: LoadedCore, times: int) -> Series:
        """Admits a new prompt, then the same again; it ends at a page boundary, so its last page is computed twice."""
        hits: list[float] = []
        for _ in range(times):
            prompt = core.tokens(ADMITTED_TOKENS)
            cold = core.admit(prompt, "cold_tick_us")
            assert cold == 0
            hits.append(core.admit(prompt, "cached_tick_us"))
        us = core.us
        plain = float(np.median(us["tick_us"]))
        return {
            "admit_cold_us": [a + b - plain for a, b in zip(us["submit_us"][::2], us["cold_tick_us"], strict=True)],
            "admit_cached_us": [
                a + b - plain for a, b in zip(us["submit_us"][1::2], us["cached_tick_us"], strict=True)
            ],
            "admit_cached_tokens": hits,
            "hash_us": us["hash_us"],
        }


def _sums(first: Iterable[float], second: Iterable[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]
