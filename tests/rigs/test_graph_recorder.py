"""The recorder of graphs plays operators back, and shows every error that a CUDA graph would hide or crash on."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpu_worker.graphs import NotCapturable
from tests.rigs.graph_recorder import DanglingMemory, GraphRecorder, RecordedGraph

SIZE = 6


class Doubling:
    """Stands for a compiled kernel, which runs only outside a dispatch mode."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.from_numpy(x.numpy() * 2)


@torch.library.custom_op("tandem_tests::add_state", mutates_args=("total",))
def add_state(total: Tensor, x: Tensor) -> Tensor:
    """Stands for an operator that finds some of its tensors through Python."""
    total += x
    return x + STATE[0]


STATE: list[Tensor] = []


@dataclass(kw_only=True)
class Toy:
    """A step with all that the worker's has: an input at a fixed place, weights, and state that is updated in place."""

    inputs: Tensor
    weight: Tensor
    state: Tensor
    double: Doubling

    @classmethod
    def made(cls) -> "Toy":
        generator = torch.Generator().manual_seed(1)
        return cls(
            inputs=torch.zeros(SIZE, dtype=torch.int64),
            weight=torch.randn(16, SIZE, generator=generator),
            state=torch.zeros(SIZE),
            double=Doubling(),
        )

    def run(self) -> Tensor:
        rows = nn.functional.embedding(self.inputs, self.weight)
        hidden = self.double(nn.functional.linear(rows, self.weight[:SIZE]).softmax(-1))
        # A slice that is written in place, a masked value, a selection into given memory.
        hidden[:2] += self.state
        hidden = torch.where(self.inputs[:, None] < 8, hidden, -hidden)
        out = torch.empty(2, SIZE)
        torch.index_select(hidden, 0, self.inputs[:2] % SIZE, out=out)
        self.state.copy_(out.sum(0))
        return torch.cat([hidden, out])

    def set_inputs(self, seed: int) -> None:
        self.inputs.copy_(torch.randint(0, 16, (SIZE,), generator=torch.Generator().manual_seed(seed)))

    def outcomes(self, step: Callable[[], Tensor], seeds: range) -> list[tuple[Tensor, Tensor]]:
        """Results and state after each of several steps."""
        self.state.zero_()
        outcomes: list[tuple[Tensor, Tensor]] = []
        for seed in seeds:
            self.set_inputs(seed)
            outcomes.append((step().clone(), self.state.clone()))
        return outcomes


def captured(run: Callable[[], Tensor]) -> tuple[RecordedGraph, Tensor]:
    return GraphRecorder(opaque=[(Doubling, "__call__")]).capture(run)


def equal(ones: list[tuple[Tensor, Tensor]], others: list[tuple[Tensor, Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for one, other in zip(ones, others, strict=True) for a, b in zip(one, other, strict=True)
    )


def replay_differs(toy: Toy, run: Callable[[], Tensor]) -> bool:
    """Whether replays of `run` and calls of it give different results for fresh inputs."""
    graph, out = captured(run)

    def replay() -> Tensor:
        graph.replay()
        return out

    replayed = toy.outcomes(replay, range(5))
    return not equal(replayed, toy.outcomes(run, range(5)))


def test_replays_give_the_results_and_the_state_of_eager_steps() -> None:
    toy = Toy.made()
    toy.set_inputs(100)
    assert not replay_differs(toy, toy.run)


def test_a_replay_runs_no_python() -> None:
    toy, ran = Toy.made(), []

    def run() -> Tensor:
        ran.append(1)
        return toy.run()

    graph, _ = captured(run)
    graph.replay()
    assert len(ran) == 1
    # A compiled kernel is the exception, as on a GPU: it is one node of the graph.
    assert toy.double.calls == 2
    assert graph.operators.count("Doubling.__call__") == 1


HOST_READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "assignment by a boolean index": lambda x: x.__setitem__(x > 0, 1),
    "where of one argument": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: x.equal(x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.long()),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "tolist": lambda x: x.tolist(),
    "python numbers": lambda x: [float(value) for value in x],
}


@pytest.mark.parametrize("name", HOST_READS)
def test_a_value_that_the_host_needs_is_refused(name: str) -> None:
    values = torch.ones(SIZE)
    recorder = GraphRecorder()
    with pytest.raises(NotCapturable):
        recorder.capture(lambda: HOST_READS[name](values))
    assert recorder.graphs == []
    # Nothing of the capture remains.
    assert values.numpy().sum() == SIZE
    assert torch.from_numpy(np.ones(2)).tolist() == [1, 1]


CONSTANTS: dict[str, Callable[[list[float]], Tensor]] = {
    "tensor": lambda host: torch.tensor(host),
    "as_tensor": lambda host: torch.as_tensor(np.array(host, np.float32)),
    "from_numpy": lambda host: torch.from_numpy(np.array(host, np.float32)),
    "number": lambda host: torch.full((SIZE,), host[0]),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_host_data_is_a_constant_of_the_capture(name: str) -> None:
    host = [1.0] * SIZE
    graph, out = captured(lambda: CONSTANTS[name](host).mul_(2))
    host[:] = [3.0] * SIZE
    for _ in range(2):
        graph.replay()
        assert out.tolist() == [2.0] * SIZE


def test_an_array_that_changes_after_the_capture_is_a_constant_too() -> None:
    host = np.ones(SIZE, np.float32)
    graph, out = captured(lambda: torch.from_numpy(host) + 1)
    host[:] = 5
    graph.replay()
    assert out.tolist() == [2.0] * SIZE
    assert host.tolist() == [5.0] * SIZE


def test_freed_memory_is_an_error() -> None:
    held = [torch.ones(SIZE)]
    graph, _ = captured(lambda: held[0] + 1)
    graph.replay()
    held[0] = torch.ones(SIZE)
    with pytest.raises(DanglingMemory, match=r"24 bytes .* was freed"):
        graph.replay()


def test_resized_memory_is_an_error() -> None:
    held = torch.ones(SIZE)
    graph, _ = captured(lambda: held + 1)
    held.resize_(1 << 20)
    with pytest.raises(DanglingMemory, match="moved or resized"):
        graph.replay()


def test_a_temporary_of_the_capture_belongs_to_the_graph() -> None:
    x = torch.ones(SIZE)
    graph, out = captured(lambda: (x + 1) * 2)
    graph.replay()
    assert out.tolist() == [4.0] * SIZE


def test_any_replay_overwrites_the_results_of_every_graph() -> None:
    recorder, x = GraphRecorder(), torch.ones(SIZE)
    first, of_first = recorder.capture(lambda: x + 1)
    second, of_second = recorder.capture(lambda: x + 2)
    first.replay()
    assert of_first.tolist() == [2.0] * SIZE
    second.replay()
    assert of_second.tolist() == [3.0] * SIZE
    assert of_first.isnan().all()


def test_memory_that_the_graph_does_not_write_holds_garbage() -> None:
    x = torch.ones(SIZE)
    late: list[Tensor] = []

    def run() -> Tensor:
        late.append(torch.empty(SIZE))
        return late[0] + x

    graph, out = captured(run)
    with torch.inference_mode():
        late[0].fill_(1)
    graph.replay()
    assert out.isnan().all()


def _by_numpy(toy: Toy) -> Callable[[], object]:
    memory = toy.weight.numpy()
    return lambda: memory.__imul__(1.01)


def _in_a_thread(toy: Toy) -> Callable[[], object]:
    def work() -> None:
        thread = threading.Thread(target=lambda: toy.weight.mul_(1.01))
        thread.start()
        thread.join()

    return work


@pytest.mark.parametrize("work", [_by_numpy, _in_a_thread])
def test_work_without_an_operator_of_this_thread_is_left_out(work: Callable[[Toy], Callable[[], object]]) -> None:
    toy = Toy.made()
    before = work(toy)

    def run() -> Tensor:
        before()
        return toy.run()

    assert replay_differs(toy, run)


@pytest.mark.parametrize("use", [lambda out, step: out + step, lambda out, step: out[step % SIZE :][:1]])
def test_python_numbers_and_choices_of_rows_are_constants(use: Callable[[Tensor, int], Tensor]) -> None:
    toy, steps = Toy.made(), itertools.count(1)
    assert replay_differs(toy, lambda: use(toy.run(), next(steps)))


def test_a_transparent_operator_is_recorded_by_what_it_calls() -> None:
    x, total = torch.ones(SIZE), torch.zeros(SIZE)
    STATE[:] = [torch.full((SIZE,), 5.0)]
    graph, out = GraphRecorder(transparent=["tandem_tests::add_state"]).capture(lambda: add_state(total, x))
    assert "tandem_tests" not in " ".join(graph.operators)
    total.zero_()
    graph.replay()
    assert (out.tolist(), total.tolist()) == ([6.0] * SIZE, [1.0] * SIZE)
    # The operator would find another tensor now; the graph has the address of the first.
    STATE[:] = [torch.full((SIZE,), 7.0)]
    with pytest.raises(DanglingMemory):
        graph.replay()


def test_any_other_operator_is_one_node() -> None:
    x, total = torch.ones(SIZE), torch.zeros(SIZE)
    STATE[:] = [torch.full((SIZE,), 5.0)]
    recorder = GraphRecorder()
    graph, out = recorder.capture(lambda: add_state(total, x) * 2)
    assert graph.operators == ("tandem_tests.add_state.default", "aten.mul.Tensor")
    assert recorder.pool_bytes == 2 * x.nbytes
    x.fill_(3)
    graph.replay()
    assert (out.tolist(), total.tolist()) == ([16.0] * SIZE, [4.0] * SIZE)
