"""The state of a meeting in the store: JSON that is checked, and never a pickle of somebody else."""

import json
import pickle
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from gpu_worker.group.meeting import Json, handler_of

RUN = "group"


def state_of_three() -> _RendezvousState:
    state = _RendezvousState()
    state.round, state.complete, state.deadline = 3, True, datetime(2026, 1, 2, 3, 4, 5, 6, UTC)
    takes_part, waits, spare = (_NodeDesc(f"host-{number}", number, 0) for number in range(3))
    state.participants[takes_part] = 0
    state.wait_list.add(waits)
    state.redundancy_list.add(spare)
    for each in (takes_part, waits):
        state.last_heartbeats[each] = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    return state


def test_a_state_is_the_same_after_the_store() -> None:
    state = state_of_three()
    again = Json.loads(Json.dumps(state))
    assert vars(again) == vars(state)
    assert Json.dumps(again) == Json.dumps(state)


def test_every_field_of_torchs_state_is_kept() -> None:
    fields = {"round", "complete", "deadline", "closed", "participants", "wait_list", "redundancy_list"}
    assert vars(_RendezvousState()).keys() == fields | {"last_heartbeats"}


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def with_waiting(launcher: object) -> bytes:
    return Json.dumps(_RendezvousState()).replace(
        b'"wait_list":[]', b'"wait_list":[%s]' % json.dumps(launcher).encode()
    )


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{}", b"[1]", b'{"round": 1}', b" " * (2 << 20)),
        *map(with_waiting, (5, "host", "host 1", "host 1 x", None, ["host 1 0"])),
    ],
)
def test_what_no_launcher_has_written_is_refused(data: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="the state of the meeting "):
        Json.loads(data)


def parameters(tmp_path: Path) -> RendezvousParameters:
    return RendezvousParameters(
        backend="c10d",
        endpoint=str(tmp_path / "store"),
        run_id=RUN,
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
        store_type="file",
        last_call_timeout=1,
    )


def backend(tmp_path: Path) -> C10dRendezvousBackend:
    return C10dRendezvousBackend(dist.FileStore(str(tmp_path / "store")), RUN)


def test_a_pickle_in_the_store_is_refused_and_not_loaded(tmp_path: Path) -> None:
    made = tmp_path / "made"
    harmful = pickle.dumps(Harmful(made))
    written = backend(tmp_path).set_state(harmful)
    assert written is not None and written[2]
    with pytest.raises(RendezvousStateError, match="the state of the meeting is not one of a launcher"):
        handler_of(parameters(tmp_path)).next_rendezvous()
    assert not made.exists()
    pickle.loads(harmful)
    assert made.exists()


def test_a_name_may_have_spaces() -> None:
    assert Json.loads(with_waiting("a host 1 0")).wait_list == {_NodeDesc("a host", 1, 0)}


def test_a_handler_meets_alone(tmp_path: Path) -> None:
    handler = handler_of(parameters(tmp_path))
    found = handler.next_rendezvous()
    assert (found.rank, found.world_size, handler.num_nodes_waiting()) == (0, 1, 0)
    written = backend(tmp_path).get_state()
    assert written is not None and len(Json.loads(written[0]).participants) == 1
    handler.shutdown()
