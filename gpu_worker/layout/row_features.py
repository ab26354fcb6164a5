"""The sampling features of rows, most of which few rows use: bans, biases, penalties, allowed tokens, logprobs.

`RowFeatures` has the parameters of each row, and two bytes per row with the features that the row uses. If no row uses
a feature, a step reads only these bytes.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from gpu_worker.wire.sampling import RowSampling
from gpu_worker.wire.started import StartedRows

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]


class Feature(IntEnum):
    """The features of a row, as bits. Not an IntFlag, because its operators cost a microsecond each."""

    # Tokens that are banned until the row reaches a position.
    BANS = 1
    BIASES = 2
    # A presence, frequency or repetition penalty, which needs the row's tokens on the device.
    PENALTIES = 4
    ALLOWED = 8
    LOGPROBS = 16
    PROMPT_LOGPROBS = 32
    # The row is not greedy.
    DRAWS = 64
    # It draws and filters by typical_p.
    TYPICAL = 128
    # Its tokens are those of a mask, which comes while the step runs.
    CONSTRAINT = 256


class RowFeatures:
    """Arrays with one entry per row. An entry is meaningless if the row's `uses` lacks the bit of the feature."""

    def __init__(self, num_rows: int) -> None:
        self.uses = np.zeros(num_rows, np.uint16)
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.banned_until = np.zeros(num_rows, np.int64)
        self.presence_penalty = np.zeros(num_rows, np.float64)
        self.frequency_penalty = np.zeros(num_rows, np.float64)
        self.repetition_penalty = np.ones(num_rows, np.float64)
        self.num_logprobs = np.zeros(num_rows, np.int64)
        self.prompt_logprobs_from = np.zeros(num_rows, np.int64)
        self.reset()

    def reset(self) -> None:
        """Drops every row."""
        self.uses[:] = 0
        self.banned: dict[int, Int64Array] = {}
        self.biases: dict[int, tuple[Int64Array, Float64Array]] = {}
        self.allowed: dict[int, Int64Array] = {}

    def start(self, started: StartedRows, *, draws: NDArray[np.bool_], is_typical: NDArray[np.bool_]) -> None:
        """Stores the features of started rows. `draws`, `is_typical` [rows]: whether they draw, and use typical_p."""
        rows = started.rows
        self.num_prompt[rows] = started.num_prompt_tokens
        self.banned_until[rows] = started.banned_until
        self.num_logprobs[rows] = started.num_logprobs
        self.prompt_logprobs_from[rows] = started.prompt_logprobs_from
        for i, row in enumerate(rows.tolist()):
            self.uses[row] = self._start(row, started.sampling[i])
            if started.banned_until[i] and started.banned[i].size:
                self.uses[row] |= Feature.BANS
                self.banned[row] = started.banned[i].astype(np.int64)
            if started.constraints and started.constraints[i]:
                self.uses[row] |= Feature.CONSTRAINT
        for bit, has in (
            (Feature.LOGPROBS, started.num_logprobs > 0),
            (Feature.PROMPT_LOGPROBS, started.prompt_logprobs_from > 0),
            (Feature.DRAWS, draws),
            (Feature.TYPICAL, draws & is_typical),
        ):
            self.uses[rows] |= np.where(has, bit, 0).astype(np.uint16)

    def _start(self, row: int, sampling: RowSampling) -> int:
        """Stores the features of the row's sampling and returns their bits."""
        settings, uses = sampling.settings, 0
        self.presence_penalty[row] = settings.presence_penalty
        self.frequency_penalty[row] = settings.frequency_penalty
        self.repetition_penalty[row] = settings.repetition_penalty
        if settings.presence_penalty or settings.frequency_penalty or settings.repetition_penalty != 1:
            uses |= Feature.PENALTIES
        if sampling.biased.size:
            uses |= Feature.BIASES
            self.biases[row] = sampling.biased, sampling.biases
        if sampling.allowed.size:
            uses |= Feature.ALLOWED
            self.allowed[row] = sampling.allowed
        return uses
