"""`tandem health`, `load` and `info`: text, JSON and exit codes."""

import json

import grpc
import pytest
from tandem.v1 import control_pb2, inference_pb2

from tests.client.fake_service import FakeService

LOAD = control_pb2.GetLoadResponse(
    running=3, waiting=2, waiting_tokens=1500, pages_used=46, pages_total=1024, workers=1, steps=12_345, step_ms=57.2,
    preemptions=1, lane_resets=2, output_tokens=9_876, pages_cached=12, prompt_tokens=800, cached_prompt_tokens=200,
    per_worker=[control_pb2.WorkerLoad(pid=31896, running=3, pages_used=46, pages_total=1024, device="cpu")],
)  # fmt: skip
HEALTH_ALONE = "this address serves health alone; the address of --listen serves the rest"


def lost(**values: object) -> control_pb2.GetLoadResponse:
    return control_pb2.GetLoadResponse(worker_lost_seconds=12.4, worker_lost_reason="it was killed", **values)


@pytest.mark.parametrize(
    ("load", "line"),
    [
        (LOAD, "serving; 1 worker, 2 requests wait"),
        (control_pb2.GetLoadResponse(workers=2), "serving; 2 workers"),
        (control_pb2.GetLoadResponse(), "serving; 0 workers"),
        (lost(waiting=1, workers=1), "serving; 1 worker, 1 request waits"),
        (
            control_pb2.GetLoadResponse(workers=1, journal_suspended="the journal /j cannot be written: no room"),
            "serving; 1 worker; the journal /j cannot be written: no room",
        ),
        (grpc.StatusCode.UNAVAILABLE, "serving; the load is not known: the scheduler's core cannot be reached"),
        (grpc.StatusCode.UNIMPLEMENTED, f"serving; the load is not known: {HEALTH_ALONE}"),
    ],
)
def test_health_counts_workers_and_waiting_requests(
    tandem, service: FakeService, load: control_pb2.GetLoadResponse | grpc.StatusCode, line: str
) -> None:
    service.load = load
    result = tandem("health")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{line}\n", "")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (control_pb2.GetLoadResponse(not_serving="no worker has joined yet"), "no worker has joined yet"),
        (control_pb2.GetLoadResponse(not_serving="it was killed", waiting=1), "it was killed; 1 request waits"),
        (control_pb2.GetLoadResponse(), "the service gives no reason"),
        (grpc.StatusCode.UNAVAILABLE, "the scheduler's core cannot be reached"),
        (grpc.StatusCode.UNIMPLEMENTED, HEALTH_ALONE),
    ],
)
def test_health_prints_the_reason_for_not_serving(
    tandem, service: FakeService, load: control_pb2.GetLoadResponse | grpc.StatusCode, reason: str
) -> None:
    service.serving(False)
    service.load = load
    result = tandem("health")
    assert (result.exit_code, result.stdout) == (3, f"not serving: {reason}\n")
    waited = tandem("health", "--wait", "0.05")
    assert (waited.exit_code, waited.stdout) == (4, f"not serving: {reason}\n")


@pytest.mark.parametrize(
    ("load", "line"),
    [
        (control_pb2.GetLoadResponse(journal_bytes=12_345), "journal   12,345 bytes"),
        (control_pb2.GetLoadResponse(journal_suspended="the disk is full"), "journal   suspended: the disk is full"),
    ],
)
def test_load_shows_the_journal(tandem, service: FakeService, load: control_pb2.GetLoadResponse, line: str) -> None:
    service.load = load
    assert tandem("load").stdout.splitlines()[-1] == line
    service.load = control_pb2.GetLoadResponse()
    assert "journal" not in tandem("load").stdout


def test_health_as_json_has_the_same_names_in_every_state(tandem, service: FakeService) -> None:
    service.load = lost(waiting=3)
    serving = {"state": "serving", "reason": "", "workers": 0, "waiting": 3, "suspects": 0, "worker_lost_seconds": 12.4}
    none = {"not_serving_reason": None, "not_serving_since": None}
    known = {"worker_lost_reason": "it was killed", "journal_suspended": ""}
    assert json.loads(tandem("health", "--json").stdout) == {**serving, **known, **none}
    service.serving(False)
    service.load = grpc.StatusCode.UNAVAILABLE
    result = tandem("health", "--json")
    unknown = dict.fromkeys(("workers", "waiting", "suspects", "worker_lost_seconds", *known, *none))
    reason = "the scheduler's core cannot be reached"
    assert (result.exit_code, json.loads(result.stdout)) == (3, {"state": "not_serving", "reason": reason, **unknown})
    service.stop()
    for arguments, exit_code in ((("health", "--json"), 3), (("health", "--json", "--wait", "0.05"), 4)):
        result = tandem(*arguments)
        found = json.loads(result.stdout)
        assert (result.exit_code, result.stderr, found["state"]) == (exit_code, "", "unreachable")
        assert f"nothing answers at {service.address}" in found["reason"]


def test_health_says_no_while_requests_are_accepted_and_not_computed(tandem, service: FakeService) -> None:
    """A health check that was answered before the worker died does not hide its loss."""
    why = "worker w-2 cannot load weights 'v2': '/weights/v2' cannot be opened"
    service.load = control_pb2.GetLoadResponse(
        not_serving=why, not_serving_reason=inference_pb2.WAIT_REASON_WEIGHTS_REFUSED, not_serving_since=1e9, waiting=2
    )
    result = tandem("health")
    assert result.exit_code == 3 and result.stdout.startswith("not serving for ")
    assert result.stdout.endswith(f" days: {why}; 2 requests wait\n")
    found = json.loads(tandem("health", "--json").stdout)
    assert (found["not_serving_reason"], found["not_serving_since"], found["reason"]) == ("weights_refused", 1e9, why)


def test_load_shows_which_worker_takes_no_requests_and_its_words(tandem, service: FakeService) -> None:
    refused = "cannot load weights 'v2': the folder is gone"
    workers = [
        control_pb2.WorkerLoad(pid=1, state=control_pb2.WORKER_STATE_STARTING),
        control_pb2.WorkerLoad(pid=2, state=control_pb2.WORKER_STATE_LOADING),
        control_pb2.WorkerLoad(pid=3, state=control_pb2.WORKER_STATE_REFUSED, detail=refused),
        control_pb2.WorkerLoad(pid=4, state=control_pb2.WORKER_STATE_STANDBY, is_standby=True),
    ]
    service.load = control_pb2.GetLoadResponse(workers=0, per_worker=workers)
    lines = tandem("load").stdout.splitlines()
    words = ("pid 1: starting", "pid 2: loading weights", f"pid 3: {refused}", "pid 4: on standby")
    at = lines.index("workers   0")
    assert lines[at + 1 : at + 5] == [f"          {each}" for each in words]
    # One worker alone is not "1" either.
    service.load = control_pb2.GetLoadResponse(per_worker=[workers[2]])
    assert tandem("load").stdout.splitlines()[-2:] == ["workers   0", f"          {words[2]}"]


def test_load_prints_six_lines_with_units(tandem, service: FakeService) -> None:
    service.load = LOAD
    assert tandem("load").stdout.splitlines() == [
        "requests  3 running, 2 waiting (1,500 tokens)",
        "pages     46 of 1,024 pages (4 %), 12 cached",
        "cache     hit rate 25 % of 800 prompt tokens",
        "steps     57 ms a step; 12,345 since start, 9,876 output tokens",
        "events    1 preemption, 2 lane resets since start",
        "workers   1 (pid 31896, cpu)",
    ]


@pytest.mark.parametrize(
    ("held", "line"),
    [
        ({}, None),
        ({"pools": 1, "pages": 1, "bytes": 44_000_000}, "held      1 pool (44 MB) of lost workers held, 1 cached page"),
        ({"taken_over": 2, "pages_kept": 1234}, "held      2 taken over since start, 1,234 pages kept"),
        (
            {"pools": 2, "pages": 30, "taken_over": 1, "pages_kept": 9, "damaged_pages": 1},
            "held      2 pools of lost workers held, 30 cached pages; 1 taken over since start, 9 pages kept; "
            "1 damaged page",
        ),
    ],
)
def test_load_shows_pools_that_outlive_their_workers(
    tandem, service: FakeService, held: dict[str, int], line: str | None
) -> None:
    service.load = control_pb2.GetLoadResponse(held_pools=control_pb2.HeldPools(**held))
    assert [each for each in tandem("load").stdout.splitlines() if each.startswith("held")] == ([line] if line else [])
    shown = json.loads(tandem("load", "--json").stdout)["held_pools"]
    assert shown == dict.fromkeys(("pools", "pages", "bytes", "taken_over", "pages_kept", "damaged_pages"), 0) | held


def test_load_has_a_line_for_each_of_several_workers_and_for_a_lost_one(tandem, service: FakeService) -> None:
    workers = [
        control_pb2.WorkerLoad(pid=77, running=2, pages_used=9, pages_total=90, device="cuda:0 NVIDIA H200"),
        control_pb2.WorkerLoad(pages_total=90),
    ]
    stops = "the service is stopping"
    service.load = lost(workers=2, not_serving=stops, host_pages_used=1, host_pages_total=4, per_worker=workers)
    lines = tandem("load").stdout.splitlines()
    assert lines[0] == "not serving: the service is stopping"
    assert lines[2].endswith("; host memory 1 of 4 pages (25 %)")
    assert lines[4] == "steps     no step yet; 0 since start, 0 output tokens"
    assert lines[6:] == [
        "workers   2",
        "          pid 77, cuda:0 NVIDIA H200: 2 running, 9 of 90 pages (10 %), 0 cached",
        "          pid unknown: 0 running, 0 of 90 pages (0 %), 0 cached",
        "lost      last worker lost 12 s ago: it was killed",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0 s"), (119, "119 s"), (120, "2 min"), (7300, "2 h"), (200_000, "2 days")]
)
def test_the_time_since_a_loss_has_a_fitting_unit(tandem, service: FakeService, seconds: float, words: str) -> None:
    service.load = control_pb2.GetLoadResponse(worker_lost_seconds=seconds)
    assert tandem("load").stdout.splitlines()[-1] == f"lost      last worker lost {words} ago"


def test_load_as_json_has_every_field(tandem, service: FakeService) -> None:
    service.load = LOAD
    load = json.loads(tandem("load", "--json").stdout)
    fields = {field.name for field in control_pb2.GetLoadResponse.DESCRIPTOR.fields}
    assert set(load) == fields | {"hit_rate"}
    assert (load["hit_rate"], load["per_worker"][0]["device"], load["worker_lost_seconds"]) == (0.25, "cpu", None)


def test_info_gives_limits_with_units_and_the_defaults_that_are_not_neutral(tandem) -> None:
    lines = dict(line.split(maxsplit=1) for line in tandem("info").stdout.splitlines())
    assert lines["length"] == "1,024 tokens, prompt and output together"
    assert lines["limits"] == "16 samples and 20 logprobs a request"
    assert lines["output"] == "the rest of the context without --max-new-tokens"
    assert lines["attention"] == "the last 4,096 tokens and the first 4"
    assert "temperature 0.5" in lines["defaults"] and "repetition penalty 1.25" in lines["defaults"]
    info = json.loads(tandem("info", "--json").stdout)
    assert (info["max_length"], info["sampling_defaults"]["repetition_penalty"]) == (1024, 1.25)
    assert info["default_max_new_tokens"] is None


def test_load_shows_the_version_of_updated_weights(tandem, service: FakeService) -> None:
    assert "weights" not in tandem("load").stdout
    load = control_pb2.GetLoadResponse(weights_version="v2", workers=2)
    for _ in range(2):
        load.per_worker.add(pid=1, weights_version="v2")
    service.load = load
    assert "weights   version v2\n" in tandem("load").stdout
    load.per_worker[1].weights_version = "v1"
    assert "weights   version v2; workers have others, as tandem load --json shows\n" in tandem("load").stdout
