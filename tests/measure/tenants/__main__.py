"""A polite tenant beside a greedy one: `python -m tests.measure.tenants [--json] [--rounds N] [--requests N]`.

In each round the greedy tenant first sends only its share of the rows, and then more, in each way that it has
(README.md). Owns the service, the order and the report.
"""

import asyncio
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tandem_client import AsyncClient
from tests.measure import call
from tests.measure.harness import Bar, Measurement, in_ms, in_turns
from tests.measure.served import served
from tests.rigs.door import token_file
from tests.rigs.processes import Child

NUM_ROWS, MAX_WAITING = 16, 256
BAR_RATIO = 2.0
MOST_SECONDS = 600.0
# The greedy tenant's first calls come all at once. gRPC accepts 512 of them in half a second, in which one or two calls
# of the polite tenant wait.
FILL_SECONDS = 3.0
SHARE = "its share"
# The greedy tenant's arguments by what it does.
WAYS: dict[str, dict[str, Any]] = {
    SHARE: {"live": NUM_ROWS // 2},
    "a salt per request": {"live": 64, "new_salts": True},
    "priority 1000": {"live": 64, "priority": 1000},
    "a full queue": {"live": 2 * MAX_WAITING},
    # Refused at once, and sent again at once, 64 at a time.
    "a priority that it may not have": {"live": 64, "why": "priority"},
    "another model": {"live": 64, "why": "model"},
    "a wrong token": {"live": 64, "why": "token"},
    "calls without the right": {"live": 64, "why": "right"},
}
TOKENS = {"polite": "tandem_benchmark_polite", "greedy": "tandem_benchmark_greedy"}


@contextmanager
def service() -> Generator[str]:
    """Runs the service until the end of the block. Yields its address."""
    with tempfile.TemporaryDirectory(prefix="tandem-tenants-") as folder:
        tokens = token_file(Path(folder), TOKENS, more="priority = [0, 1000]")
        flags = ["--tokens", str(tokens), "--scheduler", f"--max-waiting {MAX_WAITING}"]
        with served(Path(folder), *flags, "--worker", f"--max-rows {NUM_ROWS} --threads 1") as address:
            asyncio.run(_wait(address))
            yield address


async def _wait(address: str) -> None:
    async with AsyncClient(address, token=TOKENS["polite"]) as client:
        await client.wait_ready(timeout=MOST_SECONDS)


def waits_beside(address: str, way: dict[str, Any], requests: int) -> dict[str, Any]:
    """Returns the polite tenant's waits and refusals beside the greedy one."""

    def start(tenant: str, function: str, **own: Any) -> Child:
        words = call.words(f"tenants.caller.{function}", address=address, token=TOKENS[tenant], **own)
        child = Child(tenant, words)
        children.callback(child.kill)
        return child

    with ExitStack() as children:
        start("greedy", "refused" if "why" in way else "greedy", **way)
        time.sleep(FILL_SECONDS)
        return call.answer(start("polite", "polite", count=requests), MOST_SECONDS)


def summary(rounds: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each way: percentiles over all requests in ms, and the ratio to the share's p99."""
    of_all = {way: in_ms([one for part in parts for one in part["waits"]]) for way, parts in rounds.items()}
    return [
        {
            "greedy": way,
            "requests": sum(len(part["waits"]) for part in parts),
            "refusals": sum(part["refusals"] for part in parts),
            "first_token_ms": of_all[way],
            "ratio": of_all[way]["p99"] / of_all[SHARE]["p99"],
        }
        for way, parts in rounds.items()
    ]


def main() -> int:
    measurement = Measurement("tenants")
    measurement.flag("--rounds", type=int, default=3)
    measurement.flag("--requests", type=int, default=100, help="of the polite tenant, in each round and way")
    args = measurement.begin()
    with service() as address:
        ways = {name: partial(waits_beside, address, way, args.requests) for name, way in WAYS.items()}
        rounds = in_turns(args.rounds, ways)
    for line in summary(rounds):
        measurement.line(line)
        name = f"p99 of the polite tenant, of that beside its share; the greedy one sends {line['greedy']}"
        measurement.bar(Bar(name=name, value=line["ratio"], limit=BAR_RATIO))
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
