"""The choice of a cell: affinity, bounded loads, cells that fail, the memory of ids. No sockets, no clock."""

import random
from collections import Counter

import pytest

from tandem_client import AsyncClient, Client
from tandem_client.cells.router import LOOK_SECONDS, MAX_REMEMBERED, Router

CELLS = ("a:1", "b:1", "c:1", "d:1")


def keys(count: int) -> list[str]:
    return [f"{number:016x}" for number in range(count)]


def choose(router: Router, key: str, request_id: str = "r", now: float = 0.0, tried: tuple[int, ...] = ()) -> int:
    chosen = router.choose(key, request_id, now, tried)
    assert chosen is not None
    return chosen


def test_clients_choose_alike_and_spread_keys_over_cells() -> None:
    one, other = Router(CELLS), Router(CELLS)
    assert all(one.order(key) == other.order(key) for key in keys(100))
    counts = Counter(one.order(key)[0] for key in keys(4000))
    assert all(900 < counts[number] < 1100 for number in range(4))


def test_a_cell_that_is_removed_moves_only_its_own_requests() -> None:
    whole, fewer = Router(CELLS), Router(CELLS[:3])
    for key in keys(300):
        order = [number for number in whole.order(key) if number != 3]
        assert fewer.order(key) == order


def test_no_cell_has_more_than_its_share_and_a_quarter() -> None:
    router = Router(CELLS)
    rng = random.Random(0)
    # Of very unequal popularity, so that the hash alone would fill one cell.
    popular = [rng.paretovariate(0.6) for _ in range(64)]
    live: list[int] = []
    for step in range(5000):
        if live and rng.random() < 0.45:
            router.ended(live.pop(rng.randrange(len(live))))
        [key] = rng.choices(keys(64), popular)
        live.append(choose(router, key, str(step)))
        counts = Counter(live)
        assert max(counts.values()) <= max(8, 1.25 * len(live) / 4 + 1)


def test_an_idle_service_keeps_even_one_key_in_one_cell() -> None:
    router = Router(CELLS)
    assert len({choose(router, "k") for _ in range(8)}) == 1
    assert choose(router, "k") == router.order("k")[1]


def test_loads_of_others_count_and_so_do_workers() -> None:
    router = Router(CELLS[:2])
    home, other = router.order("k")
    router.reported(home, 40, 1, now=0.0)
    router.reported(other, 10, 1, now=0.0)
    assert choose(router, "k") == other
    # With four workers the same load is less than its share.
    router.reported(home, 40, 4, now=0.0)
    assert choose(router, "k") == home


def test_a_cell_without_workers_or_answers_is_avoided_for_a_while() -> None:
    router = Router(CELLS)
    home, second = router.order("k")[:2]
    router.failed(home, now=10.0)
    assert choose(router, "k", now=10.5) == second
    assert choose(router, "k", now=10.0 + LOOK_SECONDS) == home
    router.reported(home, 0, 0, now=20.0)
    assert choose(router, "k", now=20.5) == second
    router.reported(home, 0, 1, now=21.0)
    assert choose(router, "k", now=21.0) == home
    # If all failed, one is tried anyway.
    for number in range(4):
        router.failed(number, now=30.0)
    assert choose(router, "k", now=30.0) == home


def test_each_cell_is_tried_once() -> None:
    router = Router(CELLS)
    tried: list[int] = []
    while (chosen := router.choose("k", "r", 0.0, tried)) is not None:
        tried.append(chosen)
    assert tried == router.order("k")


def test_the_memory_of_ids_is_bounded_and_forgets_the_oldest() -> None:
    router = Router(CELLS)
    for number in range(MAX_REMEMBERED + 2):
        router.remember(str(number), number % 4)
        router.remember("kept", 2)
    assert router.cell_of("0") is None and router.cell_of("kept") == 2
    assert router.cell_of(str(MAX_REMEMBERED + 1)) == (MAX_REMEMBERED + 1) % 4


def test_looks_are_due_once_a_second() -> None:
    router = Router(CELLS)
    assert [router.is_look_due(now) for now in (0.0, 0.5, LOOK_SECONDS, LOOK_SECONDS + 0.5)] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        ([], "address has 0 addresses; there must be 1 to 256"),
        ([f"h{number}:1" for number in range(257)], "address has 257 addresses"),
        (["a:1", "b:1", "a:1"], "address has a:1 twice"),
    ],
)
def test_wrong_addresses_are_refused(kind: type[Client], addresses: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(addresses)


def test_a_token_goes_to_no_other_machine_without_encryption() -> None:
    with pytest.raises(ValueError, match="token would be sent to far:1 without encryption"):
        Client(["127.0.0.1:1", "far:1"], token="tandem_x")


def test_a_client_shows_its_addresses() -> None:
    assert repr(AsyncClient(["a:1", "b:1"])) == "<AsyncClient a:1, b:1>"
