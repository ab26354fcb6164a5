"""nano-vllm's workload through the whole service, and on the runner alone.

The difference between the two is the service's share: core, link, front ends and callers. Times count from the
submission of all requests to the last token, after a short round.
"""

from statistics import median

from tests.measure.gpu_day import published, workloads
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.models import TINY_SIZES
from tests.measure.gpu_day.record import Kind
from tests.measure.gpu_day.recorded_plans import record_plans, replay
from tests.measure.gpu_day.runners import checkpoint, free_memory, warm
from tests.measure.gpu_day.service import Service
from tests.measure.gpu_day.workloads import Requests

_SIZES = {"max_rows": 256, "max_length": 2048, "token_budget": 4096}
_REPEATS = 3
# Below this no further repeat through the service is begun.
_SECONDS_OF_THE_RUNNER = 140.0


def run(day: Day) -> None:
    """The service comes first, because its processes free the device's memory for the runner of this one."""
    requests = workloads.tiny() if day.tiny else workloads.nano_vllm()
    day.record.figure("prompt tokens", requests.num_prompt_tokens, "tokens", Kind.COUNTED)
    day.record.figure("output tokens", requests.num_output_tokens, "tokens", Kind.COUNTED)
    through, alone = _whole_service(day, requests), _runner_alone(day, requests)
    if not day.on_cpu and day.seconds_left() > _SECONDS_OF_THE_RUNNER:
        eager = _runner_alone(day, requests, graphs=False, repeats=1)
        day.record.figure("the runner's rate with graphs over that without", alone / eager, "")
    day.record.figure("the service's rate over the runner's", through / alone, "", note="1: the service costs nothing")
    if not day.tiny:
        day.record.figure("aim", published.AIM_TOKENS_PER_SECOND, "output tokens/s", Kind.AIM, note="one H200")
        day.record.figure("stretch", published.STRETCH_TOKENS_PER_SECOND, "output tokens/s", Kind.AIM, note="one H200")
        published.nano_vllm(day.record)


def _runner_alone(day: Day, requests: Requests, *, graphs: bool | None = None, repeats: int = _REPEATS) -> float:
    name = "runner alone" if graphs is None else "runner alone, without graphs"
    served = warm(day, "Qwen3-0.6B", _SIZES, graphs=graphs)
    with day.phase("the core's plans"):
        plans = record_plans(served.geometry, requests)
    rates: list[float] = []
    replay(served.runner, plans[: len(plans) // 10], generation=1)
    with day.phase(name):
        for generation in range(2, repeats + 2):
            one = replay(served.runner, plans, generation=generation)
            assert one.num_tokens == requests.num_output_tokens
            rates.append(one.num_tokens / one.seconds)
    day.record.repeated(name, rates, "output tokens/s", note=f"{len(plans)} plans of the core, replayed")
    del served
    free_memory(day.device)
    return median(rates)


def _whole_service(day: Day, requests: Requests) -> float:
    folder = checkpoint(day, "Qwen3-0.6B")
    num_processes = 1 if day.tiny else 4
    rates: list[float] = []
    with Service(day, str(folder), num_frontends=num_processes, **(TINY_SIZES if day.tiny else _SIZES)) as service:
        with day.phase("start of a worker"):
            worker = service.start_worker()
        while not rates or (len(rates) < _REPEATS and not day.tiny and day.seconds_left() > _SECONDS_OF_THE_RUNNER):
            with day.phase(f"run {len(rates) + 1}"):
                one = service.run(requests, worker, num_processes=num_processes)
            rates.append(requests.num_output_tokens / one.completions.seconds)
            lengths = [len(tokens) for tokens in one.completions.tokens]
            day.record.check(f"run {len(rates)}: every request has its tokens", lengths == requests.output_lengths)
    day.record.repeated("whole service", rates, "output tokens/s", note=f"{num_processes} front ends and clients")
    for name, seconds in one.cpu_seconds.items():
        per_token = 1e6 * seconds / requests.num_output_tokens
        day.record.figure(f"CPU of the {name}, last run", per_token, "µs per token")
    first = median(times[0] - one.completions.begun for times in one.completions.times)
    day.record.figure("time to first token, median of the last run", first, "s")
    day.record.figure("steps of the last run", one.steps, "steps")
    day.record.figure("preemptions in the last run", one.preemptions, "")
    return median(rates)
