"""The core decides as it did: one short session of each kind has the digest that is committed."""

from pathlib import Path

import pytest

from scheduler_svc.recording.replay import replay
from tests.sessions.digests import DIGESTS, read
from tests.sessions.kinds import KINDS, make


@pytest.mark.parametrize("name", KINDS)
def test_a_session_of_each_kind_has_its_committed_digest(tmp_path: Path, name: str) -> None:
    """If the change is meant: `make sessions-update`. If not: `make sessions` names the first event that differs."""
    kind = KINDS[name]
    digest, seen = make(name, kind.first_seed, tmp_path)
    assert all(seen[event] for event in kind.events), {event: seen[event] for event in kind.events}
    assert digest == read(DIGESTS)[name][0]
    assert sum(replay(path) for path in tmp_path.iterdir()) >= 200
