"""The lines that the terminal shows while a person waits."""

import dataclasses

from tandem.v1 import control_pb2

from tandem_client.cli.chat.answer import Silence
from tandem_client.types import Load
from tandem_client.wire import messages

LOAD = messages.load(control_pb2.GetLoadResponse())


def lost(seconds: float, reason: str = "killed") -> Load:
    return dataclasses.replace(LOAD, worker_lost_seconds=seconds, worker_lost_reason=reason)


def test_a_wait_is_told_after_a_second() -> None:
    silence = Silence(10.0)
    assert (silence.status(10.9), silence.status(13.2)) == ("", "waiting (3 s)")
    silence.requests_ahead = 2
    assert silence.status(13.2) == "waiting behind 2 requests (3 s)"
    assert silence.part(14.0) == ""
    # The queue is over once the answer has begun.
    assert (silence.status(14.5), silence.status(16.0)) == ("", "waiting (2 s)")


def test_the_loss_of_the_worker_is_told_until_the_answer_goes_on() -> None:
    silence = Silence(0.0)
    silence.part(5.0)
    # Lost at 5.4, asked at 6.0.
    silence.looked(lost(0.6), 6.0)
    assert silence.status(6.5) == "worker lost: killed; the answer goes on when another worker has it (2 s)"
    assert silence.part(8.1) == "worker lost, resumed after 3.1 s"
    assert silence.status(8.2) == "" and silence.part(8.2) == ""


def test_an_earlier_loss_is_not_the_cause() -> None:
    silence = Silence(0.0)
    silence.part(5.0)
    # Lost at 3.0, before the last part.
    silence.looked(lost(4.0), 7.0)
    assert silence.status(7.0) == "waiting (2 s)" and silence.part(7.0) == ""


def test_a_loss_stays_the_cause_while_no_worker_serves() -> None:
    silence = Silence(0.0)
    silence.looked(lost(0.5, ""), 1.0)
    silence.looked(dataclasses.replace(lost(3.0, ""), not_serving="no worker is connected"), 4.0)
    assert silence.status(4.0).startswith("worker lost; the answer goes on")


def test_a_service_that_does_not_serve_says_why() -> None:
    silence = Silence(0.0)
    silence.looked(dataclasses.replace(LOAD, not_serving="the service is draining"), 2.0)
    assert silence.status(2.0) == "the service is draining (2 s)"
    silence.looked(LOAD, 2.5)
    assert silence.status(3.0) == "waiting (3 s)"


def test_the_service_s_own_words_about_the_request_come_first() -> None:
    silence = Silence(0.0)
    silence.part(5.0)
    silence.looked(lost(0.6), 6.0)
    silence.waits("worker w-2 cannot load weights 'v2'", is_loss=False)
    assert silence.status(8.0) == "worker w-2 cannot load weights 'v2' (3 s)"
    assert silence.part(8.1) == "worker lost, resumed after 3.1 s"
    assert silence.status(10.1) == "waiting (2 s)"
    silence.waits("the last worker was lost", is_loss=True)
    assert silence.part(10.5) == "worker lost, resumed after 2.4 s"
    silence.waits("other requests have the rows", is_loss=False)
    silence.unreachable("nothing answers at a:1")
    assert silence.status(12.1).startswith("connection lost")


def test_a_lost_connection_is_told() -> None:
    silence = Silence(0.0)
    silence.part(1.0)
    silence.unreachable("nothing answers at a:1")
    assert silence.status(3.0) == "connection lost (nothing answers at a:1); trying again (2 s)"
    assert silence.part(3.5) == "connection lost, resumed after 2.5 s"
