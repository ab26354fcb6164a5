"""The commands on a cluster: workers as detached actors of Ray, named by their number in a namespace of the fleet.

The only module that imports Ray. Ray chooses the node, starts the actor again on a node that is left, and carries the
fleet's settings and reports: never a plan, a token, a weight or a key.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from gpu_worker.cluster.fleet import GRACE_SECONDS, ClusterFailed, Fleet, Named, Report, Sized, Worker, why_not_placed
from gpu_worker.failures import first_line
from tandem_contract.plural import numbered
from tandem_contract.processes import State

_ANSWER_SECONDS, _PROBE_SECONDS, _LOOK_SECONDS = 5.0, 3.0, 0.5
# For an actor's own start, beside the time for a node.
_START_SECONDS = 10.0
# The states of an actor that does not answer, and of one that cannot be made.
_WAITING, _BROKEN = "waiting", "broken"
_HEAD = "`python -m gpu_worker.cluster head` starts"


def carry_out(command: str, asked: Any) -> int:
    """Joins the cluster and does a command with its flags; returns its exit code. Raises ClusterFailed."""
    address = asked.address if asked.address != "auto" else os.environ.get("RAY_ADDRESS", "auto")
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            # Ray would try for a minute.
            socket.create_connection((host, int(port)), _PROBE_SECONDS).close()
        except (OSError, ValueError, OverflowError) as error:
            why = (getattr(error, "strerror", None) or str(error)).lower()
            raise ClusterFailed(
                f"no cluster at {address}: {why}; it must be HOST:PORT of the head; {_HEAD} one"
            ) from None
    try:
        ray.init(address=address, namespace=f"tandem-{asked.name}", log_to_driver=False, logging_level="error")
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError, AssertionError) as error:
        raise ClusterFailed(
            f"cannot join the cluster at {address}: {first_line(error)}; this host must be one of its nodes, with the "
            f"token that the cluster may ask for: `ray start` makes it one, {_HEAD} a cluster"
        ) from error
    try:
        return _COMMANDS[command](asked)
    except ValueError as error:
        # Ray has no actor of this name any more.
        raise ClusterFailed(f"{first_line(error)}; try again") from error
    finally:
        # The actors go on.
        ray.shutdown()


def _up(asked: Fleet) -> int:
    if existing := _actors():
        raise ClusterFailed(
            f"{numbered(len(existing), f'worker of {asked.name}', 'are')} up: `scale N` changes their number"
        )
    _place(asked, range(asked.workers), asked.place_seconds)
    return _watch(asked.wait_seconds)


def _scale(asked: Sized) -> int:
    actors = _actors()
    fleets = [answer for answer in _ask(actors, "fleet").values() if isinstance(answer, Fleet)]
    if not fleets:
        problem = (
            f"none of the {numbered(len(actors), 'worker')} of {asked.name} answers now; "
            f"`status` says why, try again later"
        )
        raise ClusterFailed(problem if actors else f"there are no workers of {asked.name}; `up` places them")
    _end(list(actors.values())[asked.workers :])
    free = [number for number in range(len(actors) + asked.workers) if number not in actors]
    _place(fleets[0], free[: max(0, asked.workers - len(actors))], asked.place_seconds)
    return _watch(asked.wait_seconds)


def _down(asked: Named) -> int:
    actors = _actors()
    _end(list(actors.values()))
    print(f"{numbered(len(actors), 'worker')} of {asked.name} ended")
    return 0


def _retry(asked: Named) -> int:
    retried = [f"worker {number}" for number, answer in _ask(_actors(), "retry").items() if answer is True]
    print(f"started again: {', '.join(retried) or 'none was given up'}")
    return 0


_COMMANDS: dict[str, Callable[[Any], int]] = {
    "up": _up, "scale": _scale, "down": _down, "retry": _retry,
    "status": lambda asked: _watch(0.0, as_json=asked.as_json),
}  # fmt: skip


def _watch(seconds: float, *, as_json: bool = False) -> int:
    """Prints what changes until all workers serve or have failed, or the time is over. Returns the exit code."""
    until = time.monotonic() + seconds
    shown: dict[int, tuple[str, str]] = {}
    while True:
        reports = [_report(number, answer) for number, answer in _ask(_actors(), "report").items()]
        for report in reports:
            if shown.get(report.number) != (now := (report.state, report.cause)):
                shown[report.number] = now
                print(json.dumps(asdict(report)) if as_json else report, flush=True)
        num_serving = sum(report.state == State.SERVING for report in reports)
        num_failed = sum(report.state in (State.GIVEN_UP, _BROKEN) for report in reports)
        if num_serving + num_failed == len(reports) or time.monotonic() >= until:
            if not as_json:
                print(f"{num_serving} of {numbered(len(reports), 'worker', 'serve')}")
            return 0 if reports and num_serving == len(reports) else 1
        time.sleep(_LOOK_SECONDS)


def _report(number: int, answer: Any) -> Report:
    """That of a worker; of one that does not answer, what the cluster knows."""
    if isinstance(answer, Report):
        return answer
    if not isinstance(answer, ActorDiedError):
        return Report(number=number, state=_WAITING, cause="no node has room, or its node starts it or is silent")
    # The last line has the exception of its constructor.
    lines = [line.strip()[:300] for line in str(answer).splitlines() if line.strip()]
    missing = [line for line in lines if "No module named" in line]
    hint = "; install the same version of Tandem on every node" if missing else ""
    return Report(number=number, state=_BROKEN, cause=f"{(missing or lines)[-1]}{hint}")


def _place(fleet: Fleet, wanted: Iterable[int], place_seconds: float) -> None:
    """Places workers of these numbers. Raises ClusterFailed, and ends them, if not all find a node in time."""
    one, seconds = fleet.resources(), place_seconds + _START_SECONDS
    spread = ray.remote(max_restarts=-1, max_concurrency=4, num_cpus=one["CPU"], num_gpus=one["GPU"])(Worker)
    options = {"lifetime": "detached", "scheduling_strategy": "SPREAD"}
    actors = [spread.options(name=str(number), **options).remote(fleet, number) for number in wanted]
    asked = {actor.report.remote(): actor for actor in actors}
    answered, missing = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
    if missing:
        for reference in missing:
            ray.kill(asked[reference], no_restart=True)
        _end([asked[reference] for reference in answered])
        nodes = [(node["NodeName"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
        raise ClusterFailed(why_not_placed(len(answered), len(asked), one, nodes))


def _end(actors: list[Any]) -> None:
    """Ends workers: their requests move to others; then the actors."""
    # An actor that is not there has no worker to stop.
    _wait([actor.stop.remote() for actor in actors], GRACE_SECONDS + _ANSWER_SECONDS)
    for actor in actors:
        ray.kill(actor, no_restart=True)


def _actors() -> dict[int, Any]:
    """The fleet's workers by their numbers, in order. Raises ValueError if one ends meanwhile."""
    return {number: ray.get_actor(str(number)) for number in sorted(map(int, ray.util.list_named_actors()))}


def _ask(actors: dict[int, Any], method: str) -> dict[int, Any]:
    """What each answers, or its RayError."""
    asked = {number: getattr(actor, method).remote() for number, actor in actors.items()}
    _wait(list(asked.values()), _ANSWER_SECONDS)
    return {number: _answer(reference) for number, reference in asked.items()}


def _wait(asked: list[Any], seconds: float) -> None:
    """Returns when all have an answer, or the time is over."""
    if asked:
        ray.wait(asked, num_returns=len(asked), timeout=seconds)


def _answer(asked: Any) -> Any:
    try:
        return ray.get(asked, timeout=0.05)
    except RayError as error:
        return error
