"""The parts of `make gpu-day`: what each is about, its module and its time limit."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part: a module of `tests.measure.gpu_day.parts` with a function `run(day)`."""

    name: str
    about: str
    # The part is stopped beyond it.
    limit_seconds: int
    # Whether it runs if no part is named.
    is_core: bool = False
    # Its module, if that has another name.
    file: str = ""

    @property
    def module(self) -> str:
        return f"tests.measure.gpu_day.parts.{self.file or self.name}"


# The core set comes first; its limits add up to 22 minutes, and each part's is below 9.
PARTS: tuple[Part, ...] = (
    Part(name="families", about="logits against eager attention", limit_seconds=240, is_core=True),
    Part(name="graphs", about="captured graphs against eager steps", limit_seconds=240, is_core=True),
    Part(name="serving", about="nano-vllm's workload", limit_seconds=270, is_core=True),
    Part(name="attention", about="decode attention by rows, contexts and options", limit_seconds=270, is_core=True),
    Part(name="recovery", about="a worker killed under 64 streams", limit_seconds=300, is_core=True),
    Part(name="sweep", about="attention, with time for every model and bucket", limit_seconds=530, file="attention"),
    Part(name="tutorial", about="flex-nano-vllm's benchmark", limit_seconds=530),
    Part(name="prefill", about="TFLOP/s of prompts", limit_seconds=300),
    Part(name="floor", about="a decode step against its floor", limit_seconds=300),
    Part(name="idle", about="the device's idle time between steps", limit_seconds=300),
    Part(name="host_pages", about="pages to and from host memory", limit_seconds=240),
    Part(name="starts", about="cold and warm start", limit_seconds=400),
    Part(name="peers", about="other engines on the same machine", limit_seconds=530),
)
BY_NAME = {part.name: part for part in PARTS}
CORE = tuple(part.name for part in PARTS if part.is_core)
