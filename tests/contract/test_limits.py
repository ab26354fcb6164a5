"""The look-up of a limit by the path of its field."""

import pytest
from tandem.v1 import inference_pb2 as pb

from tandem_contract.limits import limit_at


def test_a_limit_is_found_by_the_path_of_its_field() -> None:
    strings = limit_at(pb.GenerateRequest, "stop.stop_strings")
    assert strings == limit_at(pb.StopParams, "stop_strings")
    assert (strings.entries, strings.chars, strings.WhichOneof("of_high")) == (16, 256, None)
    penalty = limit_at(pb.SamplingParams, "repetition_penalty")
    assert (penalty.least, penalty.most, penalty.off) == (0.01, 100, 1)
    assert not limit_at(pb.GenerateRequest, "stop.ignore_eos").ListFields()
    with pytest.raises(KeyError):
        limit_at(pb.GenerateRequest, "stop.no_field")
