"""The variables of torchrun, and what does not fit the setting `ranks`."""

import os

import pytest

from gpu_worker.process.ranks import SINGLE, NotInGroup, Ranks, group_name, is_rank, pid_of, ranks_of

VARIABLES = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_a_worker_of_one_process_needs_no_variables() -> None:
    assert ranks_of(1, {}) is SINGLE and SINGLE.is_leader and not SINGLE.is_group
    assert not is_rank({})


def test_a_rank_is_what_torchrun_says() -> None:
    assert is_rank(VARIABLES)
    assert ranks_of(4, VARIABLES) == Ranks(rank=3, size=4, local_rank=1, local_size=2)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"WORLD_SIZE": "3"}, r"ranks is 4 and torchrun has started 3 processes \(WORLD_SIZE\)"),
        ({"RANK": "x"}, "RANK|invalid literal"),
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"LOCAL_RANK": "2"}, "variables contradict each other"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, str], problem: str) -> None:
    with pytest.raises(NotInGroup, match=problem):
        ranks_of(4, VARIABLES | changed)


def test_ranks_know_which_are_on_their_host() -> None:
    ranks = ranks_of(4, VARIABLES)
    assert ranks.spans_hosts and [ranks.shares_host(rank) for rank in range(4)] == [False, False, True, True]
    assert not SINGLE.spans_hosts and not ranks_of(4, VARIABLES | {"LOCAL_WORLD_SIZE": "4"}).spans_hosts


def test_the_launcher_stands_for_its_group() -> None:
    ranks = ranks_of(4, VARIABLES)
    ours = {"TORCHELASTIC_RUN_ID": "tandem-4711", "MASTER_PORT": "29500"}
    assert pid_of(ranks, ours) == 4711 and group_name(ours) == "29500-tandem-4711"
    # Started by torchrun itself, or on several hosts.
    for run_id in ("none", "4711", "hosts-4711"):
        assert pid_of(ranks, {"TORCHELASTIC_RUN_ID": run_id}) == os.getpid()
    assert pid_of(SINGLE, ours) == os.getpid()
