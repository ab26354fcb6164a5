"""Steps that use every shape in the ways in which captured steps go wrong."""

from tests.gpu_worker.cuda.rig import Session

FEW_RANKS = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}
MANY_RANKS = {"temperature": 0.8, "min_p": 0.05}


def every_shape(session: Session) -> None:
    """Chunks, mixed steps, and 1 to 3 rows, greedy and drawing, across ends of pages."""
    session.add(1, 44)
    session.add(2, 11, seed=3, **FEW_RANKS)
    session.add(3, 21, seed=4, **MANY_RANKS)
    session.step(chunks={1: 32})
    session.step(chunks={1: 12, 2: 11})
    session.step(chunks={3: 21}, decode=[1, 2])
    for _ in range(6):
        session.step(decode=[1, 2, 3])
    for rows in ([1], [2], [3, 1], [2, 3]):
        session.step(decode=rows)
    # Only greedy rows: other shapes. The last step starts the rows as decode rows.
    for row in (1, 2, 3):
        session.add(row, 14 + row)
    session.step(chunks={1: 15, 2: 16, 3: 17})
    for rows in ([3], [1, 2], [3, 2, 1], [2], [2, 1]):
        session.step(decode=rows)


def rejoined(session: Session) -> None:
    """Rows are preempted between replays and continue in other rows and pages; others take their places."""
    first = session.add(1, 30)
    second = session.add(2, 33, seed=8, **FEW_RANKS)
    session.step(chunks={1: 30, 2: 33})
    for _ in range(3):
        session.step(decode=[1, 2])
    again = session.rejoin(first, 3)
    session.step(chunks={3: len(again.tokens)}, decode=[2])
    session.add(1, 9)
    session.step(chunks={1: 9}, decode=[3, 2])
    session.step(decode=[1, 2, 3])
    again = session.rejoin(second, 2)
    session.step(chunks={2: len(again.tokens) - 7}, decode=[1, 3])
    session.step(chunks={2: 7}, decode=[3])
    session.step(decode=[3, 2, 1])


def two_in_flight(session: Session) -> None:
    """Each step is submitted before the outcome of the step before it, of another shape, is known."""
    session.add(1, 30)
    session.add(2, 7, seed=1, **MANY_RANKS)
    session.add(3, 64, seed=2, **FEW_RANKS)
    session.submit(chunks={1: 30, 2: 7})
    for plan in (
        {"decode": [1, 2]},
        {"decode": [1, 2]},
        {"chunks": {3: 64}, "decode": [2]},
        {"decode": [3, 1]},
        {"decode": [1]},
        {"decode": [1, 2, 3]},
        {"decode": [1, 2, 3]},
    ):
        session.submit(**plan)
        session.collect()
    session.collect()


ALL = (every_shape, rejoined, two_in_flight)
