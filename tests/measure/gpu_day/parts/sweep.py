"""The measurements of `attention`, with time for the rows and models for which its own limit leaves none."""

from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.parts import attention


def run(day: Day) -> None:
    """Measures by the same priority."""
    attention.run(day)
