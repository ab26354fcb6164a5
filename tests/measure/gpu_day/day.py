"""What every part is given: the device, the size of the work, the time that is left, and the record to write to."""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.measure.gpu_day.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    # As the worker's setting `device` names it.
    device: str
    # Tiny shapes and few requests, for a CPU; the figures mean nothing.
    tiny: bool
    # A folder that is removed afterwards.
    scratch: Path
    # On time.monotonic's clock.
    ends_at: float
    record: Record
    # A checkout of flex-nano-vllm, or "".
    flex_nano_vllm: str = ""

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def dtype(self) -> str:
        """The dtype of large models: bfloat16, and on a CPU float32."""
        return "float32" if self.on_cpu else "bfloat16"

    def seconds_left(self) -> float:
        """Seconds until the part is stopped."""
        return self.ends_at - time.monotonic()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.record.phase(name)
