"""New weights of the bundled model under traffic, through the whole service: processes, sockets and client."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem_client import Client
from tandem_client.errors import InvalidArgument
from tandem_client.types import Summary, UpdateState, Waiting, WaitReason, WeightsSpan, WorkerState
from tests.rigs.processes import Child, Rig
from tests.system.real_service import BUNDLED, NEAR_TIE, TIMEOUT_SECONDS, Case, reference

# Its workers are forked by a process that has imported torch, which takes seconds.
pytestmark = pytest.mark.together("torch")

PROMPTS = ["Return the", "def main(", "The list of", "import "]
NEW_TOKENS = 48
_WORKER = ("--page-size=16", "--max-rows=8", "--max-length=512", "--token-budget=128", "--num-pages=64")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with changed weights of the bundled model."""
    folder = tmp_path_factory.mktemp("weights") / "changed"
    shutil.copytree(BUNDLED / "model", folder)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Updatable:
    """A service with the bundled model that may load weights from `root`."""

    def __init__(self, rig: Rig, root: Path, *, num_workers: int = 1, flags: Sequence[str] = ()) -> None:
        self.rig, self.flags = rig, flags
        self.workers = [self.start_worker() for _ in range(num_workers)]
        self.scheduler = rig.scheduler("--weights-folders", str(root))
        self.client = Client(self.scheduler.address)
        self.client.wait_ready(TIMEOUT_SECONDS)
        for worker in self.workers:
            worker.wait_line("joined", TIMEOUT_SECONDS)

    def start_worker(self) -> Child:
        return self.rig.real_worker(*_WORKER, *self.flags)

    def tokens(self, prompt: str, count: int = NEW_TOKENS) -> tuple[list[int], Summary]:
        stream = self.client.generate(prompt, max_new_tokens=count, temperature=0.0, ignore_eos=True)
        tokens = [token for delta in stream for token in delta.token_ids]
        assert stream.summary is not None
        return tokens, stream.summary


@pytest.fixture(scope="module")
def expected(changed: Path) -> list[Case]:
    """What Transformers computes with the new weights."""
    return reference(changed, PROMPTS, NEW_TOKENS)


@pytest.fixture(scope="module")
def service(changed: Path) -> Iterator[Updatable]:
    with Rig() as rig:
        service = Updatable(rig, changed.parent)
        yield service
        service.client.close()


def test_a_wrong_folder_is_refused_and_nothing_changes(service: Updatable, changed: Path, tmp_path: Path) -> None:
    before, _ = service.tokens(PROMPTS[0])
    with pytest.raises(InvalidArgument, match="is not in one of the folders of --weights-folders"):
        list(service.client.update_weights("/etc", version="x"))
    link = changed.parent / "link"
    link.symlink_to(tmp_path)
    for folder, why in ((link, "which is not in one of"), (changed.parent / "none", "cannot be opened")):
        *_, last = service.client.update_weights(folder, version="x")
        assert last.state is UpdateState.REFUSED and why in last.detail
    other = changed.parent / "other"
    shutil.copytree(changed, other)
    tensors = load_file(other / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    *_, last = service.client.update_weights(other, version="x")
    assert last.state is UpdateState.REFUSED and name in last.detail
    assert service.tokens(PROMPTS[0])[0] == before


def test_the_service_computes_with_new_weights_and_so_does_its_next_worker(
    service: Updatable, changed: Path, expected: list[Case]
) -> None:
    before = [service.tokens(prompt) for prompt in PROMPTS]
    assert all(summary.weights == () for _, summary in before)
    long = service.client.generate("Return a", max_new_tokens=400, temperature=0.0, ignore_eos=True)
    deltas = iter(long)
    first = next(deltas)
    states = [progress.state for progress in service.client.update_weights(changed, version="v2")]
    rest = [token for delta in deltas for token in delta.token_ids]
    assert states[-1] is UpdateState.DONE
    assert len(first.token_ids) + len(rest) == 400 and long.summary is not None
    old, new = long.summary.weights
    assert (old.from_token, old.version, new.version) == (0, "", "v2") and 1 <= new.from_token < 400
    after = [service.tokens(prompt) for prompt in PROMPTS]
    assert [tokens for tokens, _ in after] == [case.tokens for case in expected]
    assert [tokens for tokens, _ in after] != [tokens for tokens, _ in before]
    assert all(summary.weights == (WeightsSpan(from_token=0, version="v2"),) for _, summary in after)
    service.workers[0].kill()
    again = service.start_worker()
    again.wait_line("weights 'v2' from", TIMEOUT_SECONDS)
    assert service.tokens(PROMPTS[0])[0] == expected[0].tokens
    assert [worker.weights_version for worker in service.client.load().per_worker] == ["v2"]
    # The folder is gone, and so is the worker: nothing can be computed, and everybody says so.
    away = changed.rename(changed.with_name("away"))
    again.kill()
    waiting = service.client.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    heard = list[Waiting]()

    def told(why: Waiting) -> None:
        heard.append(why)
        if len(heard) == 1:
            service.start_worker()
        if why.reason is WaitReason.WEIGHTS_REFUSED:
            load = service.client.load()
            assert (load.workers, load.not_serving, load.not_serving_reason) == (0, why.message, why.reason)
            assert [worker.state for worker in load.per_worker] == [WorkerState.REFUSED]
            assert load.per_worker[0].detail in why.message and "cannot be opened" in why.message
            assert not service.client.health()
            away.rename(changed)

    waiting.on_waiting = told
    assert [token for delta in waiting for token in delta.token_ids] == expected[0].tokens
    assert heard[0].reason is WaitReason.WORKER_LOST and WaitReason.WEIGHTS_REFUSED in [why.reason for why in heard]
    assert service.client.health() and service.client.load().workers == 1


@pytest.mark.long
def test_a_group_computes_with_new_weights_and_so_does_its_next_start(changed: Path, expected: list[Case]) -> None:
    with Rig() as rig:
        service = Updatable(rig, changed.parent, flags=["--ranks", "2"])
        before = [service.tokens(prompt)[0] for prompt in PROMPTS]
        (changed.parent / "wrong").mkdir()
        *_, last = service.client.update_weights(changed.parent / "wrong", version="v1")
        assert last.state is UpdateState.REFUSED
        *_, last = service.client.update_weights(changed, version="v2")
        assert last.state is UpdateState.DONE, last.detail
        for prompt, case, old in zip(PROMPTS, expected, before, strict=True):
            tokens, summary = service.tokens(prompt)
            assert tokens == case.tokens or case.margin < NEAR_TIE
            assert tokens != old and summary.weights == (WeightsSpan(from_token=0, version="v2"),)
        service.workers[0].kill()
        again = service.start_worker()
        again.wait_line("weights 'v2' from", TIMEOUT_SECONDS)
        assert service.tokens(PROMPTS[0])[0] == expected[0].tokens or expected[0].margin < NEAR_TIE
        service.client.close()
