"""Where the hosts of a group meet: settings that are refused, and this host's address."""

from pathlib import Path

import pytest

from gpu_worker.__main__ import check_before_imports
from gpu_worker.group.launch import Meeting, check_keys, interface_of, meeting_of
from gpu_worker.process.ranks import Ranks
from gpu_worker.settings import WorkerSettings
from tandem_contract.settings import SettingError

TWO = {"connect": "tcp://127.0.0.1:1", "ranks": 2, "nnodes": 2, "rdzv_endpoint": "127.0.0.1:29400"}
NO_KEYS = r"keys is not set; .*`tandem keys DIR NAME` on the scheduler's host makes keys"


def settings_of(**changed: object) -> WorkerSettings:
    return WorkerSettings.model_validate(TWO | changed)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"rdzv_endpoint": "h:1"}, "rdzv_endpoint is h:1 and nnodes is 1; set nnodes to the number of hosts"),
        ({"local_addr": "10.0.0.1"}, "local_addr is 10.0.0.1 and nnodes is 1"),
        (TWO | {"ranks": 3}, "ranks is 3 and nnodes is 2; each host has as many ranks: set ranks to a multiple of 2"),
        (TWO | {"ranks": 1}, "ranks is 1 and nnodes is 2"),
        (
            TWO | {"rdzv_endpoint": ""},
            "nnodes is 2 and rdzv_endpoint is not set; set it to HOST:PORT, the same on each",
        ),
        (TWO | {"connect": ""}, "nnodes is 2 and connect is not set; .* set connect to tcp://HOST:PORT, and keys"),
        (TWO | {"rdzv_id": "a b"}, "rdzv_id"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        WorkerSettings.model_validate(given)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"rdzv_endpoint": "h"}, "rdzv_endpoint is h; it must be HOST:PORT with a name or an IPv4 address"),
        ({"rdzv_endpoint": "h:0"}, "port from 1 to 65535"),
        ({"rdzv_endpoint": "[::1]:29400"}, "IPv4 address"),
        ({"rdzv_endpoint": "nowhere.invalid:29400"}, "there is no way to it"),
        ({"local_addr": "here"}, "local_addr is here; it must be an IPv4 address of this host"),
        # Of the range for documentation (RFC 5737).
        ({"local_addr": "192.0.2.1"}, "local_addr is 192.0.2.1; this host does not have it"),
        ({"local_addr": "127.0.0.1", "rdzv_endpoint": "host-1:29400"}, "host-1 means 127.0.0.1 here, which no other"),
    ],
)
def test_meetings_at_which_hosts_cannot_meet_are_refused(changed: dict[str, object], problem: str) -> None:
    with pytest.raises(SettingError, match=problem):
        meeting_of(settings_of(**changed))


def test_without_keys_the_launcher_and_the_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=NO_KEYS):
        check_before_imports(settings_of(runtime_dir=tmp_path / "run"))
    # Torchrun itself may have started the ranks.
    torchrun = WorkerSettings(ranks=2)
    with pytest.raises(SettingError, match="ranks is 2, 1 of them on this host, and keys is not set"):
        check_keys(torchrun, Ranks(rank=0, size=2, local_rank=0, local_size=1))
    check_keys(torchrun, Ranks(rank=0, size=2, local_rank=0, local_size=2))


def test_a_host_is_known_by_its_address_towards_the_meeting() -> None:
    found = meeting_of(settings_of(rdzv_id="big"))
    assert found == Meeting(num_hosts=2, host="127.0.0.1", port=29400, run_id="hosts-big", address="127.0.0.1")
    assert meeting_of(settings_of(local_addr="127.0.0.2")).address == "127.0.0.2"
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") == ""


def test_one_host_needs_no_settings() -> None:
    assert meeting_of(WorkerSettings(ranks=2)) == Meeting()
