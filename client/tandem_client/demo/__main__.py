"""`python -m tandem_client.demo`: a worker is killed while it streams, and no completion changes.

Sends the same prompts in two rounds. In the middle of the second round the demo kills the worker with SIGKILL, and
another worker starts. The exit code is 0 only if each completion equals that of the first round.
"""

import asyncio
import os
import shlex
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from tandem_client.async_client import AsyncClient
from tandem_client.demo.prompts import Question, questions
from tandem_client.demo.rounds import Arrivals, Round, differing, run_round
from tandem_client.demo.services import Services, free_address
from tandem_client.demo.show import Board, Teller, make_console, result_table, round_line
from tandem_client.errors import TandemError
from tandem_client.services.pair import flags
from tandem_client.services.programs import PROGRAMS, missing_programs
from tandem_client.services.toy import TOY_NOTICE, is_toy
from tandem_contract.processes import ServiceEnded

_INTERRUPTED = 130
# The time for the lines about the kill to end after the last stream.
_LAST_WORD_SECONDS = 1.0


def main(
    listen: Annotated[str | None, typer.Option(help="Default: a free port.")] = None,
    runtime_dir: Annotated[Path | None, typer.Option(help="Default: a temporary folder.")] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a hub name; default: the bundled one.")] = None,
    device: Annotated[str | None, typer.Option()] = None,
    dtype: Annotated[str | None, typer.Option()] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the worker; default: measured.")] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Length of each completion.")] = 64,
    scheduler: Annotated[str, typer.Option(help="More flags of the scheduler service.")] = "",
    worker: Annotated[str, typer.Option(help="More flags of the worker.")] = "",
) -> None:
    """Serve, stream, kill the worker, compare."""
    # Otherwise gRPC's library logs between the demo's lines.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    missing = missing_programs(PROGRAMS)
    if missing:
        print(f"error: {' and '.join(missing)} cannot be found: the demo runs in a checkout", file=sys.stderr)
        raise typer.Exit(1)
    teller = Teller(make_console())
    with tempfile.TemporaryDirectory(prefix="tandem-demo-") as folder:
        shared = flags(runtime_dir=runtime_dir or Path(folder) / "run")
        settings = flags(model=model, device=device, dtype=dtype, threads=threads)
        address = listen or free_address()
        services = Services(
            scheduler_flags=[*flags(listen=address), *shared, *shlex.split(scheduler)],
            worker_flags=[*settings, *shared, *shlex.split(worker)],
            say=teller.say,
        )
        with suppress(KeyboardInterrupt):
            raise typer.Exit(asyncio.run(_demo(services, address, teller, questions(tokens))))
    raise typer.Exit(_INTERRUPTED)


async def _demo(services: Services, address: str, teller: Teller, asked: list[Question]) -> int:
    problems: list[str] = []
    try:
        async with AsyncClient(address) as client:
            await services.start()
            problems += await _both_rounds(services, client, teller, asked)
    except (ServiceEnded, TandemError) as error:
        problems.append(str(error))
    finally:
        problems += await services.stop()
    for problem in problems:
        teller.say("demo", f"FAILED: {problem}")
    if not problems:
        teller.say("demo", f"all {len(asked)} completions are equal, with and without the kill")
    return 1 if problems else 0


async def _both_rounds(services: Services, client: AsyncClient, teller: Teller, asked: list[Question]) -> list[str]:
    info = await client.model_info()
    services.quiet = True
    teller.say("demo", f"serving {info.model}: {info.num_pages} pages of {info.page_size} tokens, {info.max_rows} rows")
    if is_toy(info):
        teller.say("demo", TOY_NOTICE)
    teller.say("demo", f"round 1, undisturbed: {len(asked)} prompts at once")
    undisturbed = await services.guard(_round(client, teller, asked, Arrivals()))
    teller.say("demo", round_line("round 1", undisturbed))

    teller.say("demo", "round 2: the same prompts; the worker will be killed in the middle")
    arrivals = Arrivals()
    killing = asyncio.create_task(_kill_in_the_middle(services, teller, arrivals, undisturbed.num_tokens // 3))
    try:
        disturbed = await services.guard(_round(client, teller, asked, arrivals))
        await asyncio.wait([killing], timeout=_LAST_WORD_SECONDS)
    finally:
        # Also if the demo is interrupted, because the task would call a service that has stopped.
        killing.cancel()
    teller.say("demo", round_line("round 2", disturbed))

    services.quiet = False
    unequal = differing(undisturbed, disturbed)
    teller.console.print(result_table(undisturbed, disturbed, unequal))
    problems = [f"{asked[index].prompt!r} came out differently after the kill" for index in unequal]
    if disturbed.lane_resets == 0 or not any(c.summary.timing.worker_changes for c in disturbed.completions):
        problems.append("the kill hit no running request, so it showed nothing")
    return problems


async def _round(client: AsyncClient, teller: Teller, asked: list[Question], arrivals: Arrivals) -> Round:
    with Board(teller, asked) as board:
        return await run_round(client, asked, arrivals=arrivals, on_delta=board.on_delta, on_done=board.on_done)


async def _kill_in_the_middle(services: Services, teller: Teller, arrivals: Arrivals, num_tokens: int) -> None:
    await arrivals.wait_for(num_tokens)
    killed_at = teller.seconds
    teller.say(
        "demo", f"kill -9 {services.worker_pid}, the worker, after {arrivals.num_tokens} tokens; the streams wait"
    )
    await services.kill_worker()
    teller.say("demo", f"another worker starts from nothing, process {services.worker_pid}")
    await services.ready()
    # Tokens of the killed worker may have arrived meanwhile. The next token is the new worker's.
    await arrivals.wait_for(arrivals.num_tokens + 1)
    teller.say("demo", f"tokens flow again, {teller.seconds - killed_at:.2f} s after the kill")


if __name__ == "__main__":
    typer.run(main)
