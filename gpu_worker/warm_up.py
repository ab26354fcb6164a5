"""Plans that a runner gives itself before it serves, so that every kernel it may need is compiled and loaded.

Knows nothing of devices.
"""

import numpy as np

from gpu_worker.started import StartedRows
from gpu_worker.wire import Plan


def warm_up_plan(*, num_rows: int, chunk: bool) -> Plan:
    """Step 1 of rows that all stand on page 1, as chunks of one token or as decode rows; every other row draws."""
    rows = np.arange(1, num_rows + 1, dtype=np.int32)
    ones, zeros = np.ones(num_rows, np.int32), np.zeros(num_rows, np.int32)
    started = StartedRows(
        rows=rows,
        tokens=[zeros[:1]] * num_rows,
        pages=[ones[:1]] * num_rows,
        first_position=zeros,
        num_prompt_tokens=ones,
        temperature=(rows % 2).astype(np.float32),
        top_p=np.full(num_rows, 0.5, np.float32),
        top_k=zeros,
        min_p=np.full(num_rows, 0.1, np.float32),
        seed=zeros.astype(np.uint64),
        sample_idx=zeros,
        banned_until=zeros,
        banned=[zeros[:0]] * num_rows,
    )
    running = {
        "chunk_rows": rows,
        "chunk_starts": zeros,
        "chunk_counts": ones,
        "chunk_samples": ones.astype(np.bool_),
    }
    return Plan(
        generation=0,
        step=1,
        checksum=0,
        started=started,
        **(running if chunk else {"decode_rows": rows}),
    )
