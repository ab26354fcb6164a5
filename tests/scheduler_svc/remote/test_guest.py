"""What a Join from another host loses: everything that means something on that host alone."""

import logging

import pytest
from tandem.internal.v1 import worker_pb2

from scheduler_svc.remote import as_guest
from tests.scheduler_svc.wire.test_worker import JOIN


def test_process_id_key_and_shared_pool_are_removed_and_all_else_stays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tandem.core")
    join = worker_pb2.Join.FromString(JOIN.SerializeToString())
    expected = worker_pb2.Join.FromString(JOIN.SerializeToString())
    for field in ("pid", "key", "pool_id", "pool_layout", "pool_bytes"):
        expected.ClearField(field)
    join.pid, join.key = 4711, b"k" * 32
    as_guest(join, "w-1@far")
    assert join == expected and caplog.text == ""
    join.pool_id, join.pool_layout, join.pool_bytes = b"p" * 16, b"layout", 1 << 30
    as_guest(join, "w-1@far")
    assert join == expected
    assert "worker w-1@far shares its KV pool; that is not used, because it runs on another host" in caplog.text
