"""A short fuzz run of every entrance. `make fuzz` is the long one."""

import random

import pytest
from tandem.internal.v1 import frontend_pb2, worker_pb2
from tandem.v1 import inference_pb2

from tests.fuzz.messages import MessageMaker
from tests.fuzz.run import fuzz_door, fuzz_frames, fuzz_methods


def test_internal_frames_of_any_content_harm_neither_core_nor_worker_nor_front_end() -> None:
    assert fuzz_frames(30_000, 8, print) >= 30_000


def test_no_message_to_any_method_ends_the_service_or_a_handler() -> None:
    assert fuzz_methods(120, 5, print) >= 10 * 120


def test_no_metadata_opens_a_method_without_the_token() -> None:
    assert fuzz_door(60, 5, print) >= 10 * 60


@pytest.mark.parametrize("kind", [inference_pb2.GenerateRequest, worker_pb2.WorkerToCore, frontend_pb2.FrontendToCore])
def test_a_seed_gives_the_same_frames_and_every_field_is_set(kind: type) -> None:
    first, second = (MessageMaker(kind, random.Random(1)) for _ in range(2))
    assert [first.frame() for _ in range(1000)] == [second.frame() for _ in range(1000)]
    fields = first.fields()
    for _ in range(3000):
        if first.covered < fields:
            first.frame()
    assert first.covered == fields
