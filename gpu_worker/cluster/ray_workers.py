"""Workers as detached actors of Ray, each in a placement group of its own. The only module that imports Ray.

Ray chooses the node, starts the actor again on the node that is left, and carries the fleet's settings and reports,
as strings and numbers: never a plan, a token, a weight or a key. Actors are named by their number, in a namespace of
the fleet.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gpu_worker.cluster.capacity import Node, why_not_placed, why_too_small
from gpu_worker.cluster.fleet import Fleet, namespace
from gpu_worker.cluster.reports import Report, State
from gpu_worker.cluster.supervisor import Supervisor

_ANSWER_SECONDS, _PROBE_SECONDS = 5.0, 3.0
_GRACE_SECONDS = 30.0


class ClusterFailed(RuntimeError):
    """The cluster cannot do what was asked; the message says why and what helps."""


class SupervisorActor:
    """The supervisor of one worker as an actor: its process ends with the actor's."""

    def __init__(self, fleet: dict[str, Any], number: int) -> None:
        self._fleet = fleet
        self._supervisor = Supervisor(Fleet.of_plain(fleet), number=number)

    def fleet(self) -> dict[str, Any]:
        """What `up` was asked for."""
        return self._fleet

    def report(self) -> dict[str, Any]:
        """The worker as it is now."""
        return self._supervisor.report().plain()

    def retry(self) -> bool:
        """Starts a worker again that was given up."""
        return self._supervisor.retry()

    def stop(self) -> None:
        """Ends the worker."""
        self._supervisor.stop(_GRACE_SECONDS)


def connect(address: str, fleet: str) -> None:
    """Joins this process to the cluster. Raises ClusterFailed."""
    found = address if address != "auto" else os.environ.get("RAY_ADDRESS", "auto")
    if found != "auto":
        _probe(found)
    try:
        ray.init(
            address=found,
            namespace=namespace(fleet),
            log_to_driver=False,
            logging_level="error",
            configure_logging=True,
        )
    except (RayError, ConnectionError, RuntimeError, ValueError, OSError, AssertionError) as error:
        token = "" if os.environ.get("RAY_AUTH_MODE") == "token" else ", with the token that the cluster may ask for"
        raise ClusterFailed(
            f"cannot join the cluster at {found}: {_first_line(error)}; this host must be one of its nodes{token}: "
            "`ray start` makes it one, `python -m gpu_worker.cluster head` starts a cluster"
        ) from error


def _probe(address: str) -> None:
    """Raises ClusterFailed at once, where Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ClusterFailed(f"address is {address}; it must be HOST:PORT of the head, or auto")
    try:
        socket.create_connection((host, int(port)), _PROBE_SECONDS).close()
    except OSError as error:
        raise ClusterFailed(
            f"no cluster at {address}: {(error.strerror or str(error)).lower()}; "
            "`python -m gpu_worker.cluster head` starts one"
        ) from None


def disconnect() -> None:
    """Leaves the cluster; its actors go on."""
    ray.shutdown()


def numbers(fleet: str) -> list[int]:
    """The numbers of the fleet's workers, in order."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    return sorted(int(each["name"]) for each in listed if each["namespace"] == namespace(fleet))


def place(fleet: Fleet, wanted: Iterable[int], wait_seconds: float) -> None:
    """Places workers of these numbers. Raises ClusterFailed without any of them if not all find a node in time."""
    wanted, bundle = list(wanted), fleet.bundle()
    nodes = [Node(name=_name_of(each), resources=each["Resources"]) for each in ray.nodes() if each["Alive"]]
    existing = numbers(fleet.name)
    if why := why_too_small(nodes, bundle, len(wanted) + len(existing)):
        raise ClusterFailed(why)
    groups = {number: _group(fleet, number) for number in wanted}
    until = time.monotonic() + wait_seconds
    placed = [number for number, group in groups.items() if group.wait(max(0.1, until - time.monotonic()))]
    if len(placed) < len(wanted):
        for group in groups.values():
            remove_placement_group(group)
        raise ClusterFailed(why_not_placed(len(placed), len(wanted), bundle, ray.available_resources()))
    for number, group in groups.items():
        _start(fleet, number, group)


def _group(fleet: Fleet, number: int) -> PlacementGroup:
    name = _group_name(fleet.name, number)
    return placement_group([fleet.bundle()], strategy="SPREAD", name=name, lifetime="detached")


def _start(fleet: Fleet, number: int, group: PlacementGroup) -> None:
    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
    options = ray.remote(SupervisorActor).options(
        name=str(number),
        namespace=fleet.namespace,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=4,
        num_cpus=fleet.cpus,
        num_gpus=fleet.gpus,
        scheduling_strategy=place,
    )
    options.remote(fleet.plain(), number)


def fleet_of(name: str) -> Fleet:
    """What the fleet was brought up with. Raises ClusterFailed."""
    found = numbers(name)
    if not found:
        raise ClusterFailed(f"there are no workers of {name}; `up` places them")
    for number in found:
        with contextlib.suppress(RayError):
            return Fleet.of_plain(ray.get(_actor(name, number).fleet.remote(), timeout=_ANSWER_SECONDS))
    raise ClusterFailed(f"none of the {len(found)} workers of {name} answers now; `status` says why, try again later")


def reports(fleet: str) -> list[Report]:
    """A report of each worker; of those that do not answer, what the cluster knows."""
    asked = {number: _actor(fleet, number).report.remote() for number in numbers(fleet)}
    until = time.monotonic() + _ANSWER_SECONDS
    return [_report(fleet, number, answer, until) for number, answer in asked.items()]


def _report(fleet: str, number: int, answer: Any, until: float) -> Report:
    try:
        return Report.of_plain(ray.get(answer, timeout=max(0.05, until - time.monotonic())))
    except GetTimeoutError:
        return Report(number=number, state=State.WAITING, cause=_why_waiting(fleet, number))
    except ActorUnavailableError:
        return Report(number=number, state=State.MOVING, cause=_why_waiting(fleet, number))
    except ActorDiedError as error:
        return Report(number=number, state=State.BROKEN, cause=_cause(error))


def _why_waiting(fleet: str, number: int) -> str:
    """What its placement group waits for."""
    table = placement_group_table(get_placement_group(_group_name(fleet, number)))
    if table.get("state") in ("PENDING", "RESCHEDULING"):
        return "no node has room for it"
    return "its node does not answer, or starts it"


def retry(fleet: str) -> list[int]:
    """Starts those again that were given up; returns their numbers."""
    asked = {number: _actor(fleet, number).retry.remote() for number in numbers(fleet)}
    found = []
    for number, answer in asked.items():
        with contextlib.suppress(RayError):
            if ray.get(answer, timeout=_ANSWER_SECONDS):
                found.append(number)
    return found


def end(fleet: str, which: Iterable[int]) -> None:
    """Ends workers: their requests move to others; then the actors and their places."""
    actors = {number: _actor(fleet, number) for number in which}
    stops = [actor.stop.remote() for actor in actors.values()]
    # An actor that is not there has no worker to stop.
    ray.wait(stops, num_returns=len(stops), timeout=_GRACE_SECONDS + _ANSWER_SECONDS) if stops else None
    for number, actor in actors.items():
        ray.kill(actor, no_restart=True)
        with contextlib.suppress(ValueError):
            remove_placement_group(get_placement_group(_group_name(fleet, number)))


def _actor(fleet: str, number: int) -> Any:
    try:
        return ray.get_actor(str(number), namespace=namespace(fleet))
    except ValueError:
        raise ClusterFailed(f"worker {number} of {fleet} is not there any more; try again") from None


def _group_name(fleet: str, number: int) -> str:
    return f"{namespace(fleet)}-{number}"


def _name_of(node: dict[str, Any]) -> str:
    return node.get("NodeName") or node["NodeManagerAddress"]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:300].rstrip(".")


def _cause(error: BaseException) -> str:
    """The last line of an actor's death, which has the exception of its constructor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    missing = [line for line in lines if "ModuleNotFoundError" in line or "No module named" in line]
    if missing:
        return f"{missing[-1][:300]}; install the same version of Tandem on every node"
    return (lines or [type(error).__name__])[-1][:300]
