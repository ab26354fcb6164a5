"""The most output tokens of a request: what the caller, the operator, the tenant and the room say of it."""

from itertools import product

import pytest
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.core.messages.maximum import Maximum
from scheduler_svc.door.tenant import CallerLimits
from scheduler_svc.frontend.model import load
from scheduler_svc.frontend.validate import maximum_of
from tests.scheduler_svc.frontend.fake_core import model_state

# The context has 512 tokens.
CONTEXT = 512


def unset(tokens: int) -> Maximum:
    return Maximum(tokens=tokens, is_set=False)


@pytest.mark.parametrize("default", [None, 100, 1 << 30])
@pytest.mark.parametrize("pages_hold", [0, 257, 1 << 20])
def test_a_maximum_is_the_callers_or_the_least_of_room_default_and_limit(default: int | None, pages_hold: int) -> None:
    state = model_state(max_length=CONTEXT)
    state.longest_sequence = pages_hold
    state.info.ClearField("default_max_new_tokens")
    if default is not None:
        state.info.default_max_new_tokens = default
    model = load(state)
    for own, num_prompt in product((None, 50, (1 << 30) - 1), (1, 200, 256, 257, 511)):
        limits = CallerLimits(max_new_tokens=own)
        longest = pages_hold if pages_hold == 257 and num_prompt < 257 else CONTEXT
        least = min(longest - num_prompt, *(each for each in (default, own) if each is not None), 1 << 30)
        assert maximum_of(pb.StopParams(), num_prompt, model, limits) == unset(least), (own, num_prompt)
        for asked in (1, 40, CONTEXT + 1):
            found = maximum_of(pb.StopParams(max_new_tokens=asked), num_prompt, model, limits)
            assert found == Maximum(tokens=min(asked, CONTEXT)), (own, num_prompt, asked)
