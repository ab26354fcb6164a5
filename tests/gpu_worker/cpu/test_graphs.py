"""Captured work on a CPU: a replay computes what a run would, from the inputs of now."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpu_worker.cpu.graphs import CpuGraphs, cpu_graphs
from gpu_worker.cpu.operators import Activation, gated, rms_norm, rotary
from gpu_worker.graphs import NotCapturable
from gpu_worker.native.library import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="the kernels cannot be built here")

# An operator that torch sees as a whole, with a kernel and a value of its own inside.
_library = torch.library.Library("tandem_test", "DEF")
_library.define("normed(Tensor x) -> Tensor")
_library.impl("normed", lambda x: rms_norm(x * float(x.max()), torch.ones(16), 1e-6), "CPU")

X, Y = torch.randn(3, 4, 16), torch.randn(3, 4, 16)
INDEX = torch.tensor([2, 0, 1])
# Functions of X and Y that a step of some model contains.
WORK: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda x, y: x + y,
    "scaled sum": lambda x, y: torch.add(x, y, alpha=2),
    "sum of a row": lambda x, y: x + y[0, 0],
    "sum of views": lambda x, y: x.transpose(0, 1) + y.transpose(0, 1),
    "new type": lambda x, y: (x * y).to(torch.bfloat16).float(),
    "two results": lambda x, y: torch.topk(x + y, 3),
    "in place": lambda x, y: (x * 2).add_(y).mul_(3),
    "views": lambda x, y: torch.cat([x.transpose(1, 2), y.transpose(1, 2)], -1)[:, ::2].reshape(-1),
    "chosen rows": lambda x, y: x[INDEX].index_select(1, INDEX) * y[:, :3],
    "written rows": lambda x, y: x.clone().index_put_((INDEX,), y),
    "product": lambda x, y: torch.matmul(x, y.transpose(1, 2)),
    "linear": lambda x, y: torch.nn.functional.linear(x, y[0]),
    "softmax": lambda x, y: torch.softmax(x, -1) @ y.transpose(1, 2),
    "constants": lambda x, y: x * torch.arange(16) + torch.ones_like(y) + torch.full((16,), 2.5),
    "kernels": lambda x, y: gated(rms_norm(x, torch.ones(16), 1e-6), y, Activation.SILU),
    "kernels between operators": lambda x, y: rotary((x + y)[None].cos(), y[:1, :, :8].sin(), y[:1, :, :8].cos()) * 2,
    "a kernel that reads host data": lambda x, y: x + rms_norm(torch.tensor([[1.0] * 8 + [3.0] * 8]), y[0, 0], 1e-6),
    "kernels inside an operator": lambda x, y: torch.ops.tandem_test.normed(x + y) * 2,
    "values that live long": lambda x, y: next(x * i for i in range(1, 4)) + sum(y * i for i in range(1, 9)),
}


@pytest.fixture
def graphs() -> CpuGraphs:
    found = cpu_graphs()
    assert found is not None
    return found


def _tensors(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("name", WORK)
@torch.inference_mode()
def test_a_replay_computes_from_the_inputs_of_now(graphs: CpuGraphs, name: str):
    x, y = X.clone(), Y.clone()
    graph, results = graphs.capture(lambda: tuple(_tensors(WORK[name](x, y))))
    truths = [WORK[name](X, Y), WORK[name](Y + 1, X)]
    # The capture itself has computed too.
    assert all(torch.equal(*each) for each in zip(results, _tensors(truths[0]), strict=True))
    for inputs, truth in zip([(X, Y), (Y + 1, X)], truths, strict=True):
        x.copy_(inputs[0])
        y.copy_(inputs[1])
        graph.replay()
        assert all(torch.equal(*each) for each in zip(results, _tensors(truth), strict=True))


@torch.inference_mode()
def test_graphs_share_their_memory(graphs: CpuGraphs):
    def work(x: Tensor) -> tuple[Tensor]:
        for _ in range(20):
            x = (x * 2).sin()
        return (x,)

    first, second = torch.randn(100_000), torch.randn(100_000)
    one, of_one = graphs.capture(lambda: work(first))
    size = graphs.pool_bytes
    other, of_other = graphs.capture(lambda: work(second))
    assert graphs.pool_bytes == size < 20 * first.nbytes
    for graph, results, x in ((one, of_one, first), (other, of_other, second), (one, of_one, first)):
        graph.replay()
        assert torch.equal(results[0], work(x)[0])


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x * x.max().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x if bool(x[0, 0, 0] > 0) else -x,
        lambda x: torch.repeat_interleave(x[0, 0], INDEX.repeat(6)[:16]),
    ],
    ids=["item", "mask", "nonzero", "branch", "repeat"],
)
@torch.inference_mode()
def test_work_that_needs_a_value_is_refused(graphs: CpuGraphs, work: Callable[[Tensor], Tensor]):
    with pytest.raises(NotCapturable, match="needs a value on the host"):
        graphs.capture(lambda: work(X))


@torch.inference_mode()
def test_work_that_keeps_a_tensor_is_refused(graphs: CpuGraphs):
    kept = []

    def work() -> Tensor:
        kept.append(X * 2)
        return kept[0] + 1

    with pytest.raises(NotCapturable, match="1 tensor of the step outlives it"):
        graphs.capture(work)


@torch.inference_mode()
def test_a_refused_capture_leaves_the_next_one_whole(graphs: CpuGraphs):
    with pytest.raises(NotCapturable):
        graphs.capture(lambda: (X * 2).sum().item())
    graph, (result,) = graphs.capture(lambda: (X * 3,))
    graph.replay()
    assert torch.equal(result, X * 3)
