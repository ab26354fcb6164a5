"""The request's cache parameters over real gRPC: salt, bypass_read, bypass_write; and FlushCache."""

import base64
from pathlib import Path
from typing import Any

import psutil
import pytest
from tandem.v1 import inference_pb2 as pb

from tests.rigs.processes import Rig
from tests.rigs.streams import Caller
from tests.system.asks import Ask, answer
from tests.system.conftest import Served

PAGE_SIZE = 4
# Ten full pages and one token.
PROMPT = tuple(range(40, 81))
WHOLE = len(PROMPT) - len(PROMPT) % PAGE_SIZE


@pytest.fixture
def caller(served: Served) -> Caller:
    served.caller.flush_cache()
    return served.caller


def ask(num_samples: int = 1, **cache: object) -> Ask:
    extra = pb.GenerateRequest(cache=pb.CacheParams(**cache))  # type: ignore[arg-type]
    return Ask(prompt=PROMPT, max_new_tokens=3, num_samples=num_samples, extra=extra)


def cached(caller: Caller, asked: Ask) -> int:
    """Generates, checks the output, and returns the number of cached prompt tokens."""
    usage = answer(caller, asked).summary.usage
    assert usage.prompt_tokens == len(PROMPT)
    return usage.cached_prompt_tokens


@pytest.mark.parametrize(
    ("asked", "hits"),
    [
        ([{"salt": salt} for salt in ("", "a", "b", "a", "", "b")], [0, 0, 0, WHOLE, WHOLE, WHOLE]),
        ([{}, {"bypass_read": True}, {}], [0, 0, WHOLE]),
        ([{"bypass_read": True}, {}], [0, WHOLE]),
        ([{"bypass_write": True}, {}, {"bypass_write": True}], [0, 0, WHOLE]),
        # Several samples report the hits of the first.
        ([{}, {"num_samples": 3}], [0, WHOLE]),
    ],
)
def test_hits_are_as_the_parameters_say(caller: Caller, asked: list[dict[str, Any]], hits: list[int]) -> None:
    assert [cached(caller, ask(**each)) for each in asked] == hits


def test_the_load_counts_hits_and_a_flush_empties_the_cache(caller: Caller) -> None:
    before = caller.load()
    assert cached(caller, ask(bypass_write=True)) == 0 and caller.load().pages_cached == 0
    assert [cached(caller, ask()) for _ in range(2)] == [0, WHOLE]
    after = caller.load()
    assert after.prompt_tokens - before.prompt_tokens == 3 * len(PROMPT)
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == WHOLE
    kept = after.pages_cached
    assert kept == sum(worker.pages_cached for worker in after.per_worker) >= WHOLE // PAGE_SIZE
    assert [caller.flush_cache(), caller.load().pages_cached, caller.flush_cache()] == [kept, 0, 0]
    assert cached(caller, ask()) == 0


def test_flush_without_a_worker_returns_zero_pages(rig: Rig) -> None:
    scheduler = rig.scheduler()
    caller = rig.caller(scheduler)
    assert caller.flush_cache() == 0
    worker = rig.worker("--num-pages", "40")
    caller.wait_serving()
    served = caller.model_info()
    cached(caller, ask())
    assert caller.load().pages_cached > 0
    worker.kill()
    gone = caller.wait_load(lambda load: load.workers == 0)
    assert (gone.pages_total, gone.pages_used, gone.pages_cached, list(gone.per_worker)) == (0, 0, 0, [])
    assert (gone.prompt_tokens, gone.worker_pid) == (len(PROMPT), 0)
    assert caller.flush_cache() == 0
    # The next worker must serve the same model, so the service keeps reporting it.
    assert caller.model_info() == served


def test_secrets_appear_in_no_file_log_or_answer(rig: Rig, tmp_path: Path) -> None:
    """Secrets are the root of page hashes, the front ends' secret and the workers' key (allowed in worker.key only)."""
    drawn, files = tmp_path / "drawn", tmp_path / "files"
    files.mkdir()
    record, steps = files / "record", files / "steps.csv"
    flags = ("--record", str(record), "--steps", str(steps), "--log-level", "debug", "--frontends", "2")
    scheduler = rig.scheduler(*flags, program=("tests.rigs.known_secrets", str(drawn)))
    worker = rig.worker("--num-pages", "40")
    caller = rig.ready_caller(scheduler)
    cached(caller, ask(salt="a tenant"))
    exposed: list[bytes] = []
    service = psutil.Process(scheduler.pid)
    for process in (service, *service.children(), psutil.Process(worker.pid)):
        exposed += [Path(f"/proc/{process.pid}/{what}").read_bytes() for what in ("cmdline", "environ")]
    exposed += [one.SerializeToString() for one in (caller.model_info(), caller.load())]
    assert scheduler.terminate() == 0
    assert worker.terminate() in (0, 3)
    found = [path for folder in (files, rig.runtime_dir) for path in folder.rglob("*") if path.is_file()]
    assert {record, steps, rig.runtime_dir / "worker.key"} <= set(found)
    exposed += [path.read_bytes() for path in found if path.name != "worker.key"]
    exposed += ["\n".join(child.lines).encode() for child in rig.children]
    # Shorter values are names of files and connections, not secrets.
    secrets = [value for line in drawn.read_text().split() if len(value := bytes.fromhex(line)) == 32]
    assert len(secrets) == 3
    for secret in secrets:
        forms = [secret, secret.hex().encode(), base64.b64encode(secret), repr(secret)[2:-1].encode()]
        assert not [form for form in (*forms, str(list(secret)).encode()) for one in exposed if form in one]
