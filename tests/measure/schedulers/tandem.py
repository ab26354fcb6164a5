"""The measured variants of Tandem's core: steady steps, steps beside a blocked queue, admissions.

Owns the variants and their conditions, which it asserts; `core.py` runs and judges them.
"""

from functools import partial

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
        loaded = partial(LoadedCore, num_rows, context, num_logprobs=num_logprobs, report_steps=report_steps)
        spare = {"step": 0, "rows_taken_waiting": 0, "admit": 1}
        self._cores = {
            each: loaded(MOST_STEPS if each == "admit" else num_steps, spare_rows=spare.get(each, _SPARE_ROWS))
            for each in self.variants
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
        return {**core.us, "step_us": [a + b for a, b in zip(core.us["done_us"], core.us["tick_us"], strict=True)]}

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
        took = {
            f"admit_{kind}_us": [
                a + b - plain for a, b in zip(us["submit_us"][i::2], us[f"{kind}_tick_us"], strict=True)
            ]
            for i, kind in enumerate(("cold", "cached"))
        }
        return {**took, "admit_cached_tokens": hits, "hash_us": us["hash_us"]}
