"""The switch of what needs gRPC's inside: everything is found in this version, and what is not is off with its cost."""

import asyncio
import logging
import socket
import types
from dataclasses import replace

import grpc.aio
import pytest
from grpc._cython import cygrpc

from scheduler_svc.frontend.grpc_tuning import call_lines, ends, event_loop, sockets, tuning
from scheduler_svc.frontend.grpc_tuning.event_loop import QUEUE
from scheduler_svc.frontend.grpc_tuning.sockets import Corks


def test_this_version_has_everything(caplog: pytest.LogCaptureFixture):
    assert tuning.find() == tuning.ON and not caplog.records


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (QUEUE, ["wakeups"]),
        (ends.WAITING_COROUTINE, ["lines", "release"]),
        (ends.BATCH, ["release"]),
        *((name, ["lines"]) for name in (call_lines.BEGIN, call_lines.END, call_lines.SERVER)),
        *((name, ["resets"]) for name in ends.QUESTIONS),
    ],
)
def test_a_part_whose_name_is_gone_is_off_and_the_log_says_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, parts: list[str]
):
    monkeypatch.delattr(cygrpc, name)
    assert tuning.find() == replace(tuning.ON, **dict.fromkeys(parts, False))
    for part, record in zip(parts, caplog.records, strict=True):
        assert f"{part} is off, because grpcio {grpc.__version__}" in record.getMessage()
        assert record.levelno == logging.WARNING and record.getMessage().endswith(tuning._COSTS[part])


def test_calls_are_not_taken_through_a_function_with_other_parameters(monkeypatch: pytest.MonkeyPatch):
    async def begin(method_name: str, rpc_state: object, loop: object) -> None: ...

    monkeypatch.setattr(cygrpc, call_lines.BEGIN, begin)
    assert tuning.find() == replace(tuning.ON, lines=False)


def test_on_another_system_what_it_has_is_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(sockets, "FILES", "/nowhere")
    monkeypatch.setattr(event_loop, "has_heaps", lambda: False)
    monkeypatch.setattr(asyncio, "Future", object)
    assert tuning.find() == replace(tuning.OFF, wakeups=True, release=True)
    assert len(caplog.records) == 5


def test_a_grpcio_without_its_inner_module_still_serves(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> types.ModuleType:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(tuning.importlib, "import_module", missing)
    assert tuning.find() == replace(tuning.ON, wakeups=False, lines=False, release=False, resets=False)


def test_without_corks_nobody_looks_for_sockets(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> dict[str, socket.socket]:
        raise AssertionError("the files of the process are looked at")

    monkeypatch.setattr("scheduler_svc.frontend.grpc_tuning.sockets.sockets_to", refuse)
    corks = Corks(is_on=False)
    context = types.SimpleNamespace(peer=lambda: "ipv4:127.0.0.1:1")
    connections = [corks.join(context) for _ in range(3)]
    assert all(one.duplicate is None for one in connections)
