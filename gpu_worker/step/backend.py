"""What runs the steps of a model on one kind of device.

`cuda/steps.py` has the steps of a GPU, which are padded, captured at the start, and run while the host goes on;
`cpu/steps.py` those of a CPU, which have their own sizes, share the host's memory, and end with `finish`. `backends.py`
chooses once.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.arrays import HostArray
from gpu_worker.attention.views import View
from gpu_worker.graphs import Captures
from gpu_worker.layout.step_layout import StepInputs, StepShape
from gpu_worker.step.output import BegunStep, StaticOutput, StepOutput


class StepTimer:
    """The time of one step on the device, from when the timer was made."""

    def __init__(self, started: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        """Both measure time."""
        self._started, self._ended = started, ended
        started.record()

    def end(self) -> None:
        """Marks the end of the step's work."""
        self._ended.record()

    def is_over(self) -> bool:
        return self._ended.query()

    def wait(self) -> int:
        """Waits for the end. Returns the step's microseconds. Passes on errors of the device."""
        self._ended.synchronize()
        return int(self._started.elapsed_time(self._ended) * 1e3)


# Takes the number of rows and a function that writes their masks, int32 [rows, words]. Returns them on the device, as
# uint8 [rows, bytes], valid until the next call.
MaskUpload = Callable[[int, Callable[[NDArray[np.int32]], None]], Tensor]


class StepBackend(Protocol):
    """Runs steps by `inputs_of`, `upload`, `run` and `finish`; the next may begin before the results are read."""

    # What block lists are laid out for; empty if kernels read the page table themselves.
    views: tuple[View, ...]
    # Whether the kernels compile during the warm-up.
    compiles: bool

    @property
    def graphs(self) -> Captures[Any]:
        """The captured steps."""
        ...

    @property
    def summary(self) -> str:
        """What the log says of captured steps after the warm-up; empty if nothing."""
        ...

    def inputs_of(self, need: StepShape) -> tuple[StepShape, StepInputs[HostArray]]:
        """Returns the shape of the next step, which needs the sizes `need`, and its inputs, to be written.

        They are valid until the step runs.
        """
        ...

    def upload(self, inputs: Any, extras: Any) -> tuple[Any, Any]:
        """Returns both trees with tensors for their arrays, which are int64 or float32.

        `inputs` are None, or those that `inputs_of` returned last. The next upload overwrites them.
        """
        ...

    def run(self, shape: StepShape, inputs: StepInputs[Tensor]) -> StaticOutput:
        """Computes the logits of the step that was uploaded last; its page tables are set. The next one overwrites
        them."""
        ...

    def finish(self, begun: BegunStep, masks: Tensor | None) -> StepOutput:
        """Computes the tokens and logprobs of the step that ran last, on their way to the host.

        masks: of its rows with constraints, as `sampling/logits.py` takes them.
        """
        ...

    def put_back(self, output: StepOutput) -> None:
        """Takes back the memory of results that were read; their tensors are invalid from now on."""

    def timer(self) -> StepTimer | None:
        """The timer of the next step. None: `run` and `finish` return when their work has ended."""
        ...

    def mask_upload(self, *, max_rows: int, mask_words: int) -> MaskUpload:
        """Memory for masks. mask_words: int32 words of a row's mask."""
        ...

    def warm_up_steps(self, rehearse: Callable[..., object]) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yields by name what compiles and captures every step that may run later. rehearse: runs plans."""
        ...
