"""`tandem requests`: its table, its totals, its JSON."""

import json

from tandem.v1 import control_pb2, inference_pb2

from tests.client.fake_service import FakeService

WAITING, RUNNING = control_pb2.REQUEST_STATE_WAITING, control_pb2.REQUEST_STATE_RUNNING
KEPT, QUEUE = control_pb2.REQUEST_STATE_KEPT, inference_pb2.WAIT_REASON_QUEUE
ID = "88bb0f3c" * 4


def entry(request_id: str, tenant: str = "", **fields: object) -> control_pb2.RequestEntry:
    abort_id = f"{tenant}/{request_id}" if tenant else request_id
    values = {"num_samples": 1, "state": RUNNING, "max_new_tokens": 4096, **fields}
    return control_pb2.RequestEntry(request_id=request_id, tenant=tenant, abort_id=abort_id, **values)  # type: ignore[arg-type]


def test_a_table_with_a_line_for_each_sample_and_totals(tandem, service: FakeService) -> None:
    service.listed = [
        entry(ID, age_seconds=300, output_tokens=4000),
        entry("many", age_seconds=12.4, output_tokens=7, num_samples=2, max_new_tokens=20),
        entry("many", age_seconds=12.4, num_samples=2, sample_idx=1, state=WAITING, wait_reason=QUEUE),
        entry("old", age_seconds=90_000, output_tokens=5, max_new_tokens=0, state=KEPT, is_detached=True),
    ]
    result = tandem("requests")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        f"{'ID':32}  AGE    TOKENS     STATE",
        f"{ID}  5 min  4000/4096  running",
        f"{'many':32}  12 s   7/20       running, sample 1/2",
        f"{'many':32}  12 s   0/4096     waiting: queue, sample 2/2",
        f"{'old':32}  25 h   5          kept, no reader",
        "3 requests (4 samples): 1 waiting, 2 running, 1 kept; 4,012 output tokens",
    ]
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_ids_that_do_not_fit_have_lines_of_their_own(tandem, service: FakeService) -> None:
    """Whole, because `tandem abort` takes them."""
    tenant = "a" * 64
    service.listed = [entry(ID, tenant), entry("x", "b")]
    assert tandem("requests").stdout.splitlines() == [
        "ID",
        "    TENANT            AGE  TOKENS  STATE",
        f"{tenant}/{ID}",
        f"    {'a' * 15}…  0 s  0/4096  running",
        "b/x",
        f"    b{' ' * 15}  0 s  0/4096  running",
        "2 requests: 2 running; 0 output tokens",
    ]


def test_control_characters_are_shown_as_visible_ones(tandem, service: FakeService) -> None:
    service.listed = [entry("\x1b[2Ja\u202e", "t\x07")]
    assert "␛[2Ja<U+202E>" in tandem("requests").stdout
    assert not {"\x1b", "\x07", "\u202e"} & set(tandem("requests").stdout)


def test_an_empty_list_says_so(tandem) -> None:
    assert tandem("requests").stdout == "no request waits or runs\n"
    assert tandem("requests", "--tenant", "acme").stdout == "no such request waits or runs\n"
    assert tandem("requests", "--json").stdout == "[]\n"


def test_flags_reach_the_service_and_a_limit_says_that_there_are_others(tandem, service: FakeService) -> None:
    service.listed = [entry(f"r{number}") for number in range(5)]
    flags = ("--limit=3", "--tenant", "acme", "--state", "running", "--state", "kept", "--id", "r")
    limited = tandem("requests", *flags)
    assert [line.split()[0] for line in limited.stdout.splitlines()[:-1]] == ["ID", "r0", "r1", "r2"]
    assert limited.stdout.splitlines()[-1] == "3 requests: 3 running; 0 output tokens; there are others (--limit)"
    assert [query.page_token for query in service.list_queries] == ["", "2"]
    wanted = control_pb2.ListRequestsRequest(tenant="acme", states=[RUNNING, KEPT], id_prefix="r")
    assert service.list_queries[0] == wanted
    assert "others" not in tandem("requests", "--limit", "5").stdout
    assert tandem("requests", "--state", "ended").exit_code == 2
    found = json.loads(tandem("requests", "--json").stdout)
    assert [one["request_id"] for one in found] == ["r0", "r1", "r2", "r3", "r4"]
    assert (found[0]["state"], found[0]["seconds_left"], found[0]["wait_reason"]) == ("running", None, None)
