"""What the sampling rows of a step ask for, as named int64 arrays for the step's one copy, and back as tensors.

Owns the names and encodings of these arrays. Knows nothing of how the copy is made, nor of attention.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gpu_worker.sampling.logits import Biases, LogitEdits, Penalties
from gpu_worker.sampling.sampler import RankGroup, SamplingInputs
from gpu_worker.step.edits import EditPart, float_bits
from gpu_worker.step.row_tables import RowTables
from gpu_worker.step.samples import Int64Array, SamplePart

# Colder than this is as good as greedy, and logits divided by less overflow.
_MIN_TEMPERATURE = 1e-5


def sample_arrays(samples: SamplePart, tables: RowTables) -> dict[str, Int64Array]:
    """Every int64 array that sampling needs on the device."""
    arrays = {"kept_tokens": samples.kept, "sample_rows": samples.rows}
    if samples.drawing.size:
        rows, sampling = samples.rows[samples.drawing], tables.sampling
        arrays["drawing"] = samples.drawing
        arrays["drawing_position"] = samples.positions[samples.drawing]
        arrays["drawing_temperature"] = float_bits(np.maximum(sampling["temperature"][rows], _MIN_TEMPERATURE))
        for name in ("top_p", "min_p"):
            arrays[f"drawing_{name}"] = float_bits(sampling[name][rows])
        arrays["drawing_seed"] = sampling["seed"][rows].view(np.int64)
        for name in ("top_k", "sample_idx"):
            arrays[f"drawing_{name}"] = sampling[name][rows].astype(np.int64)
        for name in ("few_ranks", "many_ranks"):
            places = getattr(samples, name)
            if 0 < places.size < rows.size:
                arrays[name] = places
    if samples.told.size:
        arrays["told"] = samples.told
    if samples.prompt is not None:
        arrays["prompt_targets"] = samples.prompt.targets
    if samples.edits is not None:
        arrays |= samples.edits.arrays
    return arrays


def drawing_of(samples: SamplePart, staged: Mapping[str, Tensor], tables: RowTables) -> SamplingInputs | None:
    """How the rows that are not greedy draw; None where every row is greedy."""
    if not samples.drawing.size:
        return None
    return SamplingInputs(
        rows=staged["drawing"],
        temperature=_floats(staged["drawing_temperature"]),
        top_p=_floats(staged["drawing_top_p"]),
        top_k=staged["drawing_top_k"],
        min_p=_floats(staged["drawing_min_p"]),
        seed=staged["drawing_seed"],
        sample_idx=staged["drawing_sample_idx"],
        position=staged["drawing_position"],
        # A group that is all of them needs no list.
        rank_groups=tuple(
            RankGroup(places=staged.get(name), few=few)
            for name, few in (("few_ranks", True), ("many_ranks", False))
            if getattr(samples, name).size
        ),
        filters_min_p=bool((tables.sampling["min_p"][samples.rows[samples.drawing]] > 0).any()),
    )


def edits_of(part: EditPart, staged: Mapping[str, Tensor]) -> LogitEdits:
    """What changes which samples' logits."""
    biases = penalties = draws = allowed = None
    if "edited_draws_from" in part.arrays:
        draws = staged["edited_draws_from"], staged["edited_draws_to"]
    if "biases" in part.arrays:
        biases = Biases(at=staged["biased_at"], tokens=staged["biased_tokens"], values=_floats(staged["biases"]))
    if "restricted" in part.arrays:
        allowed = staged["restricted"], staged["allowed_at"], staged["allowed_tokens"]
    if "penalised" in part.arrays:
        penalties = Penalties(
            at=staged["penalised"],
            rows=staged["penalised_rows"],
            num_known=staged["penalised_known"],
            num_prompt=staged["penalised_prompt"],
            presence=_floats(staged["presence_penalty"]),
            frequency=_floats(staged["frequency_penalty"]),
            repetition=_floats(staged["repetition_penalty"]),
            max_known=part.max_known,
            repeats=part.repeats,
            counts=part.counts,
        )
    return LogitEdits(samples=staged["edited"], draws=draws, biases=biases, penalties=penalties, allowed=allowed)


def _floats(bits: Tensor) -> Tensor:
    return bits.view(torch.float64).float()
