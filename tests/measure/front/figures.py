"""The figures of one run of streams. Owns the definitions; knows nothing of processes.

A message is a row (stream, time, first token, number of tokens); a row with first token -1 is the request. The window
of a run begins when every stream has its first token. Tokens per second, tokens per message and gaps are those of the
window; times to the first token, and the time that tokens take, are those of the whole run.
"""

from typing import Any

import numpy as np

from tests.measure.harness import percentiles

_WHICH = (50, 99, 100)


def stream_figures(rows: np.ndarray, begun: float, over: float) -> dict[str, Any]:
    """Figures of a run from the client's rows and the window, both on CLOCK_MONOTONIC."""
    is_request = rows[:, 2] < 0
    requested = {int(row[0]): row[1] for row in rows[is_request]}
    rows = rows[~is_request]
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    numbers, times, counts = rows[:, 0].astype(np.int64), rows[:, 1], rows[:, 3]
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    is_inside = (times > begun) & (times <= over)
    gaps = np.diff(times)[(np.diff(numbers) == 0) & is_inside[1:] & is_inside[:-1]]
    num_tokens, num_messages = int(counts[is_inside].sum()), int(is_inside.sum())
    first_ms = [1e3 * (times[at] - requested[int(numbers[at])]) for at in starts]
    return {
        "streams": len(starts),
        "tokens_per_second": num_tokens / (over - begun),
        "tokens_per_message": num_tokens / num_messages,
        "gap_ms": percentiles(1e3 * gaps, _WHICH),
        "first_token_ms": percentiles(first_ms, _WHICH),
    }


def delivery_ms(rows: np.ndarray, sent_at: np.ndarray) -> dict[str, float]:
    """Milliseconds of each token from the worker's send to the client's read. `sent_at`: float64[streams, tokens]."""
    rows = rows[rows[:, 2] >= 0]
    counts = rows[:, 3].astype(np.int64)
    numbers, read_at = (np.repeat(rows[:, column], counts) for column in (0, 1))
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens = np.repeat(rows[:, 2], counts).astype(np.int64) + within
    return percentiles(1e3 * (read_at - sent_at[numbers.astype(np.int64), tokens]), _WHICH)


def wait_figures(waits: dict[str, np.ndarray]) -> dict[str, Any]:
    """Milliseconds that tokens waited, without the first of each stream; see `probed_service.waits`."""
    names = {"front_end_ms": "arrived", "from_core_ms": "sent"}
    return {name: percentiles(1e3 * waits[of][~waits["first"]], _WHICH) for name, of in names.items()}
