"""What a caller says of the cache, over real gRPC: whose pages it finds, what it leaves, and forgetting all of them."""

import base64
from pathlib import Path

import psutil
import pytest
from tandem.v1 import inference_pb2 as pb

from tests.rigs.processes import Rig
from tests.rigs.streams import Caller
from tests.system.asks import Ask
from tests.system.conftest import Served

PAGE_SIZE = 4
# Ten full pages and a token.
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
    """Prompt tokens that were not computed; what came is right in any case."""
    transcript = caller.generate(asked.request()).result()
    asked.check(transcript)
    assert transcript.summary.usage.prompt_tokens == len(PROMPT)
    return transcript.summary.usage.cached_prompt_tokens


def test_a_prompt_is_found_again(caller: Caller) -> None:
    before = caller.load()
    assert [cached(caller, ask()) for _ in range(2)] == [0, WHOLE]
    after = caller.load()
    assert after.prompt_tokens - before.prompt_tokens == 2 * len(PROMPT)
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == WHOLE
    assert after.pages_cached == sum(worker.pages_cached for worker in after.per_worker) >= WHOLE // PAGE_SIZE


def test_a_salt_finds_its_own_and_no_others(caller: Caller) -> None:
    salts = ["", "a", "b", "a", "", "b"]
    assert [cached(caller, ask(salt=salt)) for salt in salts] == [0, 0, 0, WHOLE, WHOLE, WHOLE]


def test_who_bypasses_reading_finds_nothing_and_is_found(caller: Caller) -> None:
    cached(caller, ask())
    assert cached(caller, ask(bypass_read=True)) == 0
    caller.flush_cache()
    assert cached(caller, ask(bypass_read=True)) == 0
    assert cached(caller, ask()) == WHOLE


def test_who_bypasses_writing_leaves_nothing_and_finds(caller: Caller) -> None:
    assert cached(caller, ask(bypass_write=True)) == 0
    assert caller.load().pages_cached == 0
    assert cached(caller, ask()) == 0
    assert cached(caller, ask(bypass_write=True)) == WHOLE


def test_a_flush_forgets_everything_and_counts_it(caller: Caller) -> None:
    cached(caller, ask())
    kept = caller.load().pages_cached
    assert caller.flush_cache() == kept > 0
    assert caller.load().pages_cached == 0
    assert caller.flush_cache() == 0
    assert cached(caller, ask()) == 0


def test_samples_tell_what_the_first_one_found(caller: Caller) -> None:
    cached(caller, ask())
    assert cached(caller, ask(num_samples=3)) == WHOLE


def test_nothing_is_kept_without_a_worker_and_that_is_no_error(rig: Rig) -> None:
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
    # Who comes next is served the same model, so that is told on.
    assert caller.model_info() == served


def test_no_secret_of_the_service_reaches_files_logs_or_callers(rig: Rig, tmp_path: Path) -> None:
    """The root of page hashes, the front ends' secret and the workers' key, which stands in its own file alone."""
    drawn, files = tmp_path / "drawn", tmp_path / "files"
    files.mkdir()
    record, steps = files / "record", files / "steps.csv"
    flags = ("--record", str(record), "--steps", str(steps), "--log-level", "debug", "--frontends", "2")
    scheduler = rig.scheduler(*flags, program=("tests.rigs.known_secrets", str(drawn)))
    worker = rig.worker("--num-pages", "40")
    caller = rig.caller(scheduler)
    caller.wait_serving()
    cached(caller, ask(salt="a tenant"))
    told: list[bytes] = []
    service = psutil.Process(scheduler.pid)
    for process in (service, *service.children(), psutil.Process(worker.pid)):
        told += [Path(f"/proc/{process.pid}/{what}").read_bytes() for what in ("cmdline", "environ")]
    told += [answer.SerializeToString() for answer in (caller.model_info(), caller.load())]
    assert scheduler.terminate() == 0
    assert worker.terminate() in (0, 3)
    found = [path for folder in (files, rig.runtime_dir) for path in folder.rglob("*") if path.is_file()]
    assert {record, steps, rig.runtime_dir / "worker.key"} <= set(found)
    told += [path.read_bytes() for path in found if path.name != "worker.key"]
    told += ["\n".join(child.lines).encode() for child in rig.children]
    # Shorter ones are names of files and connections.
    secrets = [value for line in drawn.read_text().split() if len(value := bytes.fromhex(line)) == 32]
    assert len(secrets) == 3
    for secret in secrets:
        forms = [secret, secret.hex().encode(), base64.b64encode(secret), repr(secret)[2:-1].encode()]
        assert not [form for form in (*forms, str(list(secret)).encode()) for one in told if form in one]
