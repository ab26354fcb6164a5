"""A worker without a device: it takes plans and returns when each is done and which tokens it yields.

Owns the setup of a run, and the row tables from which the cost of a plan follows: positions, and where each sequence
ends. It computes no model: a token is a hash of the row's request and position until the request's given end, where the
token is EOS.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import NO_IDS, Int32Array, Int64Array
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.plan import Plan, RowStart
from scheduler_svc.core.messages.worker_info import WorkerInfo
from scheduler_svc.simulator.cost import CostModel, StepShape
from scheduler_svc.simulator.workload import Spread, eos_of

# The low bits of a request's stream and seed are its slot, the bits above them its serial number.
SLOT_BITS = 24
SLOT_MASK = (1 << SLOT_BITS) - 1
_FACTOR = 2654435761


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The core and the workers that serve the requests.

    `ask_tokens` is the max_new_tokens of every request, and EOS ends the output before it. If it is 0, each request
    asks for exactly the tokens it gets. A step's tokens are padded to a multiple of `token_multiple`. `shares_prefixes`
    switches the prefix cache on. `link_seconds` is the delay between core and worker, each way. Each of `cells`
    services has a core and `workers` workers; a core takes `core_seconds` for each request and each step of a worker.
    Each of its `front_ends` takes `message_seconds` for a message and `request_seconds` for a request; if there are 0,
    what they do takes no time. Every `kill_seconds`, a worker dies, 0: none does; it joins again after
    `restart_seconds`.
    """

    config: CoreConfig
    info: WorkerInfo
    cost: CostModel
    workers: int = 1
    link_seconds: float = 100e-6
    token_multiple: int = 1
    ask_tokens: int = 0
    shares_prefixes: bool = True
    cells: int = 1
    spread: Spread = Spread.HASH
    core_seconds: float = 0.0
    front_ends: int = 0
    message_seconds: float = 0.0
    request_seconds: float = 0.0
    kill_seconds: float = 0.0
    restart_seconds: float = 10.0
    seed: int = 0


class SimulatedWorker:
    """Executes plans one after another."""

    def __init__(self, name: str, setup: Setup, targets: Mapping[int, int]) -> None:
        """`targets` are the output tokens of the live request in each slot."""
        self.name = name
        self.info = info = setup.info
        self.results: deque[tuple[float, ev.StepDone]] = deque()
        """The time at which each result reaches the core, in order."""
        self.busy_seconds = 0.0
        self.steps = 0
        self.wanted_tokens = 0
        """Positions that the plans contained."""
        self.padding_tokens = 0
        """Positions computed only to pad steps."""
        self._setup = setup
        self._targets = targets
        self._free_at = 0.0
        self._eos = eos_of(info.vocab_size)
        rows = info.max_rows + 1
        # By row: positions computed, position of the last token, and the seed of the tokens.
        self._position = np.zeros(rows, np.int64)
        self._last = np.zeros(rows, np.int64)
        self._key = np.zeros(rows, np.int64)

    def take(self, plan: Plan, now: float) -> None:
        """Executes a plan that was sent at `now`. Its result is appended to `results`."""
        for start in plan.starts:
            self._start(start)
        chunk_starts, chunk_counts = plan.chunk_starts.astype(np.int64), plan.chunk_counts.astype(np.int64)
        sampled = plan.decode_rows
        if len(plan.chunk_rows):
            self._position[plan.chunk_rows] = chunk_starts + chunk_counts
            sampled = np.concatenate([plan.chunk_rows[plan.chunk_samples == 1], plan.decode_rows])
        self._position[plan.decode_rows] += 1
        step = self._shape(plan, chunk_starts, chunk_counts, len(sampled))
        seconds = self._setup.cost.seconds(step)
        done = max(self._free_at, now + self._setup.link_seconds) + seconds
        self._free_at = done
        self._account(step, seconds)
        result = ev.StepDone(
            worker=self.name,
            generation=plan.generation,
            step=plan.step,
            status=ev.StepStatus.OK,
            detail="",
            tokens=self._tokens(sampled),
            nonfinite=NO_IDS,
            compute_us=round(seconds * 1e6),
        )
        self.results.append((done + self._setup.link_seconds, result))

    def _start(self, start: RowStart) -> None:
        row, stream = start.row, int.from_bytes(start.sampling, "little")
        self._position[row] = start.first_position
        self._last[row] = start.num_prompt_tokens + self._targets[stream & SLOT_MASK] - 1
        self._key[row] = stream >> SLOT_BITS

    def _shape(self, plan: Plan, starts: Int64Array, counts: Int64Array, samples: int) -> StepShape:
        align, multiple = self.info.chunk_align, self._setup.token_multiple
        aligned = int((-(-counts // align) * align).sum()) if len(counts) else 0
        moves = plan.moves
        return StepShape(
            chunk_starts=starts,
            chunk_counts=counts,
            contexts=self._position[plan.decode_rows],
            computed_tokens=-(-(len(plan.decode_rows) + aligned) // multiple) * multiple,
            samples=samples,
            pages_copied=len(moves.copied_from),
            host_pages_moved=len(moves.saved_pages) + len(moves.loaded_pages),
        )

    def _account(self, step: StepShape, seconds: float) -> None:
        wanted = int(step.chunk_counts.sum()) + len(step.contexts)
        self.steps += 1
        self.busy_seconds += seconds
        self.wanted_tokens += wanted
        self.padding_tokens += step.computed_tokens - wanted

    def _tokens(self, sampled: Int32Array) -> Int32Array:
        """Returns the token at each row's next position, which is EOS from the sequence's end on."""
        following = self._position[sampled]
        tokens = (following * _FACTOR + self._key[sampled] * 40503 >> 5) % (self.info.vocab_size - 1)
        tokens[following >= self._last[sampled]] = self._eos
        return tokens.astype(np.int32)
