"""How many refusals get a line, and that the number of the others is reported."""

from scheduler_svc.frontend.request_log import LINES_EACH, OTHER, REPORT_SECONDS, RefusalCounts

FULL, WRONG = ("RESOURCE_EXHAUSTED", "queue_full"), ("INVALID_ARGUMENT", "prompt")


def test_the_first_refusals_of_each_kind_get_a_line_and_the_others_are_counted() -> None:
    counts = RefusalCounts()
    assert list(counts.due(100.0)) == []
    assert sum(counts.add(FULL) for _ in range(5000)) == LINES_EACH
    assert counts.add(WRONG)
    assert list(counts.due(100.0 + REPORT_SECONDS - 0.1)) == []
    assert list(counts.due(100.0 + REPORT_SECONDS)) == [(FULL, 5000 - LINES_EACH)]
    assert counts.add(FULL)
    assert list(counts.due(100.0 + 2 * REPORT_SECONDS)) == []


def test_kinds_beyond_a_number_share_one_count() -> None:
    counts = RefusalCounts()
    list(counts.due(0.0))
    lines = sum(counts.add(("INVALID_ARGUMENT", f"field {idx}")) for idx in range(100_000))
    assert lines <= 64 + LINES_EACH
    [(kind, count)] = counts.due(REPORT_SECONDS)
    assert (kind, count) == (OTHER, 100_000 - lines)
