"""What few rows ask of sampling, by row: bans, biases, penalties, allowed tokens, logprobs.

Owns the host's state of it, and one byte per row that says what a row uses, so that steps whose rows use nothing pay
for one look at it. Knows nothing of torch, of steps or of how logits are changed.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from gpu_worker.wire.fields import Int32Array
from gpu_worker.wire.started import StartedFeatures, StartedRows

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]


class Uses(IntEnum):
    """What a row asks for, as bits. No IntFlag: its operators cost a microsecond each."""

    # Tokens that may not come out until a position is reached.
    BANS = 1
    BIASES = 2
    # Of presence, frequency or repetition: the row's tokens must be known on the device.
    PENALTIES = 4
    ALLOWED = 8
    LOGPROBS = 16
    PROMPT_LOGPROBS = 32


class RowFeatures:
    """One entry per row; an array's entry means nothing where `uses` lacks its flag."""

    def __init__(self, num_rows: int) -> None:
        self.uses = np.zeros(num_rows, np.uint8)
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.banned_until = np.zeros(num_rows, np.int64)
        self.presence_penalty = np.zeros(num_rows, np.float64)
        self.frequency_penalty = np.zeros(num_rows, np.float64)
        self.repetition_penalty = np.ones(num_rows, np.float64)
        self.num_logprobs = np.zeros(num_rows, np.int64)
        self.prompt_logprobs_from = np.zeros(num_rows, np.int64)
        self.reset()

    def reset(self) -> None:
        """Forgets every row."""
        self.uses[:] = 0
        self.banned: dict[int, Int64Array] = {}
        self.biases: dict[int, tuple[Int64Array, Float64Array]] = {}
        self.allowed: dict[int, Int64Array] = {}

    def start(self, started: StartedRows) -> None:
        """Takes over what started rows ask for."""
        rows = started.rows
        self.uses[rows] = 0
        self.num_prompt[rows] = started.num_prompt_tokens
        for i in np.flatnonzero(started.banned_until).tolist():
            if started.banned[i].size:
                row = int(rows[i])
                self.uses[row] |= Uses.BANS
                self.banned[row], self.banned_until[row] = started.banned[i].astype(np.int64), started.banned_until[i]
        if started.features is not None:
            self._start(rows, started.features)

    def _start(self, rows: Int32Array, asked: StartedFeatures) -> None:
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            getattr(self, name)[rows] = getattr(asked, name)
        self.num_logprobs[rows] = asked.num_logprobs
        self.prompt_logprobs_from[rows] = asked.prompt_logprobs_from
        penalised = (asked.presence_penalty != 0) | (asked.frequency_penalty != 0) | (asked.repetition_penalty != 1)
        self.uses[rows] |= np.where(penalised, Uses.PENALTIES, 0).astype(np.uint8)
        self.uses[rows] |= np.where(asked.num_logprobs > 0, Uses.LOGPROBS, 0).astype(np.uint8)
        self.uses[rows] |= np.where(asked.prompt_logprobs_from > 0, Uses.PROMPT_LOGPROBS, 0).astype(np.uint8)
        lists = zip(rows.tolist(), asked.biased, asked.biases, asked.allowed, strict=True)
        for row, biased, biases, allowed in lists:
            if biased.size:
                self.uses[row] |= Uses.BIASES
                self.biases[row] = biased.astype(np.int64), biases.astype(np.float64)
            if allowed.size:
                self.uses[row] |= Uses.ALLOWED
                self.allowed[row] = allowed.astype(np.int64)
