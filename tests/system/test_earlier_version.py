"""A worker of an earlier version serves under today's scheduler, and today's workers under a scheduler of that version.

The earlier version comes from git, with stubs made from its own protos, and runs in a folder of its own. Streams go on
with exact tokens when a worker is killed and one of the other version takes them over.
"""

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FieldDescriptor as Field
from grpc_tools import protoc
from tandem.internal.v1 import frontend_pb2, worker_pb2

from tandem_client import Client
from tests.rigs.processes import REPOSITORY, Child, Rig
from tests.system.asks import Ask, random_asks, send
from tests.system.featured import Reading

# The commit from which on the internal protos only gain fields.
COMMIT = "633a2f63"
SHAPE = ("--num-pages", "256", "--max-rows", "8", "--max-length", "512", "--token-budget", "64", "--identity", "same")
VARINTS = {Field.TYPE_UINT32, Field.TYPE_UINT64, Field.TYPE_INT32, Field.TYPE_INT64, Field.TYPE_BOOL, Field.TYPE_ENUM}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the earlier version, with its stubs."""
    folder = tmp_path_factory.mktemp("earlier")
    paths = ("protos", "scheduler_svc", "tests/__init__.py", "tests/rigs")
    archive = subprocess.run(["git", "-C", REPOSITORY, "archive", COMMIT, *paths], capture_output=True)
    if archive.returncode:
        pytest.skip(f"the history has no {COMMIT}: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    subprocess.run([sys.executable, "protos/build_hook.py"], cwd=folder, check=True, capture_output=True)
    return folder


def inside(folder: Path) -> tuple[str, ...]:
    """The command within which `python -m` runs the code of the folder."""
    paths = [str(folder / name) for name in ("", "protos", ".stubs")]
    return "env", "-C", str(folder), f"PYTHONPATH={os.pathsep.join(paths)}"


@pytest.mark.parametrize("is_earlier", ["worker", "scheduler"])
def test_two_versions_serve_together(rig: Rig, earlier: Path, is_earlier: str) -> None:
    there, here = inside(earlier), ()
    first, second = (there, here) if is_earlier == "worker" else (here, here)
    # So slow that no stream ends before the second worker has started.
    workers: list[Child] = [rig.worker(*SHAPE, "--step-ms", "40", within=first)]
    scheduler = rig.scheduler(within=there if is_earlier == "scheduler" else here)
    old = workers[0] if is_earlier == "worker" else scheduler
    assert psutil.Process(old.pid).cwd() == str(earlier), "it runs other code"
    caller = rig.ready_caller(scheduler)
    asks = [
        *random_asks(6, seed=9, prompts=(1, 60), outputs=(200, 300)),
        Ask(prompt=(1, 2, 3), max_new_tokens=40, logprobs=2, prompt_logprobs_start=1),
        Ask(prompt=(4, 5, 6), max_new_tokens=60, temperature=0.9, seed=5, num_samples=2, top_k=20, ignore_eos=False),
    ]
    streams = send(caller, asks)
    canceled = caller.generate(Ask(prompt=(7, 8), max_new_tokens=400).request())
    canceled.wait_tokens(5)
    canceled.cancel()
    for stream in streams[:6]:
        stream.wait_tokens(20)
    workers.append(rig.worker(*SHAPE, within=second))
    rig.kill_serving(caller, workers)
    streams.check()
    load = caller.wait_idle()
    assert load.lane_resets == 1
    # The streams that the killed worker served went on with the other one.
    assert all(stream.result().summary.timing.worker_changes == 1 for stream in streams[:6])


@pytest.mark.parametrize("is_earlier", ["first", "second"])
def test_a_journal_goes_on_under_the_other_version(rig: Rig, earlier: Path, is_earlier: str) -> None:
    """An upgrade, and the way back: streams that resume miss and repeat nothing, and the worker's pages are used."""
    there, here = inside(earlier), ()
    first, second = (there, here) if is_earlier == "first" else (here, there)
    flags = ("--journal", str(rig.runtime_dir / "journal"))
    rig.worker(*SHAPE, "--step-ms", "2")
    scheduler = rig.scheduler(*flags, within=first)
    rig.ready_caller(scheduler)
    asks = [
        Ask(prompt=ask.prompt, max_new_tokens=200, num_samples=1 + i % 2, request_id=f"r-{i}", seed=i, temperature=0.9)
        for i, ask in enumerate(random_asks(4, seed=7, prompts=(20, 60), outputs=(200, 200)))
    ]
    with Client(scheduler.address) as client:
        reading = Reading(client, asks, resume=True)
        reading.wait_more(100)
        address = scheduler.address
        scheduler.kill_with_frontends()
        scheduler = rig.scheduler(*flags, listen=address, within=second)
        folder = str(earlier) if second else str(REPOSITORY)
        assert psutil.Process(scheduler.pid).cwd() == folder, "it runs other code"
        reading.check()
    load = rig.caller(scheduler).wait_idle()
    assert load.cached_prompt_tokens > 0, "the pages that the worker has kept were computed again"


def test_internal_messages_only_gain_fields(earlier: Path, tmp_path: Path) -> None:
    source, target = earlier / "protos", tmp_path / "set"
    names = ["tandem/internal/v1/frontend.proto", "tandem/internal/v1/worker.proto"]
    includes = [f"-I{source}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
    assert protoc.main(["protoc", *includes, f"--descriptor_set_out={target}", "--include_imports", *names]) == 0
    files = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    pool = descriptor_pool.Default()
    assert {worker_pb2.DESCRIPTOR.name, frontend_pb2.DESCRIPTOR.name} == set(names)
    changed = [
        f"{name}.{field.name} = {field.number}"
        for file in files
        for name, message in _messages(file.package, file.message_type if file.name in names else ())
        for now in [pool.FindMessageTypeByName(name).fields_by_number]
        for field in message.field
        if field.number not in now or not _is_same(field, now[field.number])
    ]
    assert changed == []


def _messages(
    outer: str, messages: Iterable[descriptor_pb2.DescriptorProto]
) -> Iterator[tuple[str, descriptor_pb2.DescriptorProto]]:
    """Yields all messages with their full names, those in messages too."""
    for message in messages:
        name = f"{outer}.{message.name}"
        yield name, message
        yield from _messages(name, message.nested_type)


def _is_same(before: descriptor_pb2.FieldDescriptorProto, now: Field) -> bool:
    """Whether both have one name, and one reads what the other has written."""
    is_same_kind = before.type == now.type or {before.type, now.type} <= VARINTS
    return before.name == now.name and is_same_kind and (before.label == 3) == now.is_repeated
