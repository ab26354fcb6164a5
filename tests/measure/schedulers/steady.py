"""The measuring loop of every peer. Owns nothing."""

from collections.abc import Callable


def steady_steps(step: Callable[[], tuple[dict[str, float], int]], num_rows: int, times: int) -> dict[str, list[float]]:
    """Runs `times` steps. Returns the series of each figure.

    Raises AssertionError if a step did not decode all rows.
    """
    series: dict[str, list[float]] = {}
    for _ in range(times):
        figures, num_decoding = step()
        assert num_decoding == num_rows
        for key, value in figures.items():
            series.setdefault(key, []).append(value)
    return series
