"""What a Join from another host loses: everything that means something on that host alone."""

import logging

import pytest

from scheduler_svc.remote import as_guest
from tests.scheduler_svc.wire.test_worker import a_join


def test_process_id_key_and_shared_pool_are_removed_and_all_else_stays(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tandem.core")
    expected = a_join()
    for field in ("pid", "key", "pool_id", "pool_layout", "pool_bytes"):
        expected.ClearField(field)
    own = {"pid": 4711, "key": b"k" * 32}
    as_guest(join := a_join(**own), "w-1@far")
    assert join == expected and caplog.text == ""
    as_guest(join := a_join(**own, pool_id=b"p" * 16, pool_layout=b"layout", pool_bytes=1 << 30), "w-1@far")
    assert join == expected
    assert "worker w-1@far shares its KV pool; that is not used, because it runs on another host" in caplog.text
