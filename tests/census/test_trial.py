"""The judgement of a trial: what may differ from eager attention, and where near ties decide."""

import pytest
import torch

from tests.census.trial import Mismatch, errors_within

ALLOWED = 0.01
EXACT = torch.ones(50, 4, dtype=torch.float64)


def off_by(*errors: float) -> torch.Tensor:
    """The exact values with relative errors at the first positions."""
    ours = EXACT.clone()
    ours[: len(errors)] += torch.tensor(errors, dtype=torch.float64)[:, None]
    return ours


def test_small_errors_pass_and_one_wrong_position_does_not() -> None:
    assert errors_within("x", off_by(*[0.005] * 50), EXACT, ALLOWED).ratio == pytest.approx(0.5)
    with pytest.raises(Mismatch, match=r"at most by 0\.3 \(entry 1\); 0\.01 is allowed, 0\.12 at this entry"):
        errors_within("x", off_by(0.0, 0.3), EXACT, ALLOWED)


def test_a_position_may_err_as_much_as_eager_attention_does_there() -> None:
    sensitivity = torch.full((50,), 0.004, dtype=torch.float64)
    sensitivity[1] = 0.3
    found = errors_within("x", off_by(0.0, 0.31), EXACT, ALLOWED, sensitivity)
    assert (found.near_ties, found.ratio) == (1, 0.0)
    with pytest.raises(Mismatch, match=r"entry 1"):
        errors_within("x", off_by(0.0, 0.7), EXACT, ALLOWED, sensitivity)
    # The next position is not sensitive.
    with pytest.raises(Mismatch, match=r"entry 2"):
        errors_within("x", off_by(0.0, 0.31, 0.31), EXACT, ALLOWED, sensitivity)
    # All others together still may not err by more than is allowed.
    with pytest.raises(Mismatch):
        errors_within("x", off_by(0.0, *[0.02] * 49), EXACT, ALLOWED, sensitivity)


def test_a_model_that_rounding_decides_everywhere_is_not_judged_by_it() -> None:
    sensitivity = torch.full((50,), 0.3, dtype=torch.float64)
    with pytest.raises(Mismatch, match="rounding alone decides 50 of 50 positions"):
        errors_within("x", off_by(0.0, 0.3), EXACT, ALLOWED, sensitivity)
