"""Runs the programs of `tandem serve` from their checked settings to their end, and says on the display what happens.

`pair` owns the processes. Owns the commands to paste for the addresses of the service. A token is never in a command:
it takes it from a variable, and the shell says so if the variable is not set.
"""

import asyncio
import contextlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem_client.address import DEFAULT_ADDRESS, dialled
from tandem_client.errors import TandemError
from tandem_client.peer import own_names
from tandem_client.services.display import Display, Endpoint
from tandem_client.services.pair import TOY_NOTICE, ServicePair, is_toy, probe
from tandem_client.services.phases import Phase
from tandem_client.services.settings import GATEWAY, SCHEDULER, WORKER, Settings
from tandem_contract.certificates import shortest
from tandem_contract.processes import WRONG_SETTINGS, ServiceEnded
from tandem_contract.stopping import Asked, StopRequests

# Longer than the service's own grace for its streams (30 s by default).
_STOP_SECONDS = 45.0
_ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 1.0
# The exit code for a program that ended for good, unless its settings are wrong.
_FAILED = 1
_BODY = json.dumps({"prompt": "Return the", "max_tokens": 16})
_TOKEN = '"authorization: Bearer ${TANDEM_TOKEN:?is not set}"'


def run(
    flags: Mapping[str, Sequence[str]],
    settings: Mapping[str, Settings],
    display: Display,
    *,
    standbys: int,
    holder_flags: Sequence[str] | None,
) -> tuple[int, str]:
    """Serves until a signal comes or a program ends for good; returns the exit code, and the cause or an empty text.

    `flags` and `settings` are by program; without those of the gateway, none is started.
    """
    pair = ServicePair(
        scheduler_flags=flags[SCHEDULER],
        worker_flags=flags[WORKER],
        standbys=standbys,
        holder_flags=holder_flags,
        gateway_flags=flags.get(GATEWAY),
        settings=settings[SCHEDULER],
        on_line=display.show,
        on_end=display.ended,
        say=display.say,
    )
    return asyncio.run(serve(pair, display, settings))


async def serve(pair: ServicePair, display: Display, settings: Mapping[str, Settings]) -> tuple[int, str]:
    """As `run`, with these processes."""
    stop, requests = asyncio.Event(), StopRequests()

    def on_signal() -> None:
        if requests.announce():
            said = "stopping: new requests are refused, running ones may end; Ctrl-C or SIGTERM again ends them at once"
            display.stopping(said)
            stop.set()
        elif requests.asked == Asked.STOP_NOW:
            display.say("stopping now: all requests end")
            pair.stop_now()

    requests.listen_in(asyncio.get_running_loop(), on_signal)
    pair.start()
    beside = [asyncio.create_task(_announce(pair, display, settings)), asyncio.create_task(_look(display))]
    try:
        await pair.guard(stop.wait())
    except ServiceEnded as end:
        if end.in_order:
            display.stopping("the service was drained; stopping")
            return 0, ""
        code = WRONG_SETTINGS if end.wrong_settings else _FAILED
        display.stopping(f"stopping all programs; tandem serve ends with exit code {code}")
        display.fail()
        return code, str(end)
    finally:
        for task in beside:
            task.cancel()
        for line in await pair.stop(_STOP_SECONDS):
            display.say(line)
    return 0, ""


async def _announce(pair: ServicePair, display: Display, settings: Mapping[str, Settings]) -> None:
    """Says where the service is reached, whenever all programs serve: after the start, and after each restart."""
    noticed = False
    while True:
        address = await pair.ready()
        display.end_phase(Phase.JOIN)
        if not noticed:
            noticed = True
            with contextlib.suppress(TandemError):
                async with probe(address) as client:
                    if is_toy(await client.model_info(timeout=_ANSWER_SECONDS)):
                        display.say(TOY_NOTICE)
        endpoints = [of_grpc(address, await pair.command())]
        if url := await pair.url():
            needs_token = bool(settings[SCHEDULER]["tokens"])
            endpoints.append(of_http(url, settings[GATEWAY], needs_token=needs_token))
        display.ready(endpoints)
        await pair.down()


async def _look(display: Display) -> None:
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        display.look()


def of_grpc(address: str, command: str) -> Endpoint:
    """`command`: the scheduler's own; empty if the address is all that a caller needs."""
    named = "" if address == DEFAULT_ADDRESS else f"--address {address} "
    return Endpoint("gRPC", address, command or f'tandem generate {named}"Return the"')


def of_http(url: str, gateway: Settings, *, needs_token: bool) -> Endpoint:
    """The gateway with these settings, which listens at `url`."""
    scheme, _, bound = url.partition("://")
    address = dialled(bound)
    words = ["curl"]
    certificate, key = gateway["tls_cert"], gateway["tls_key"]
    if certificate and key:
        words.append(f"--cacert {shlex.quote(str(Path(certificate).absolute()))}")
        host, _, port = address.rpartition(":")
        names = own_names(Path(certificate), Path(key))
        if names and shortest(host) not in names:
            here = [name for name in ("localhost", "127.0.0.1") if name in names and address != bound]
            if not here:
                words.append(f"--connect-to ::{address}")
            name = here[0] if here else names[0].replace("*", "tandem", 1)
            address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    words.append(f"{scheme}://{address}/v1/completions -H 'content-type: application/json'")
    if needs_token:
        words.append(f"-H {_TOKEN}")
    return Endpoint("HTTP", f"{scheme}://{bound}", " ".join([*words, f"-d '{_BODY}'"]))
