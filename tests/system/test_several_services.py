"""One client of two services by gRPC's round_robin: one of them dies, and only its own streams end."""

from tandem_client import Client
from tandem_client.errors import Unavailable
from tandem_client.sync_client import GenerateStream
from tests.rigs.processes import Rig
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.system.asks import Ask

SHAPE = ("--page-size", "4", "--num-pages", "512", "--max-rows", "16", "--max-length", "1024")
ASKS = [Ask(prompt=(number, 1, 2), max_new_tokens=40) for number in range(12)]


def send(client: Client, ask: Ask) -> GenerateStream:
    return client.generate(list(ask.prompt), max_new_tokens=ask.max_new_tokens, temperature=0.0, ignore_eos=True)


def check(ask: Ask, stream: GenerateStream) -> None:
    for _ in stream:
        pass
    assert list(stream.samples[0].token_ids) == ask.expected().tokens


def test_a_service_that_dies_takes_its_streams_and_no_others() -> None:
    with Rig() as first, Rig() as second:
        schedulers, _, callers = zip(*(rig.serve(*SHAPE) for rig in (first, second)), strict=True)
        with Client(f"ipv4:{','.join(caller.address for caller in callers)}") as client:
            client.wait_ready(TIMEOUT_SECONDS)
            with first.slowed(), second.slowed():
                # Until both are connected, all requests go to one.
                homes: set[int] = set()
                while len(homes) < 2:
                    stream = send(client, ASKS[0])
                    next(stream)
                    homes.add([caller.load().running for caller in callers].index(1))
                    stream.close()
                    for caller in callers:
                        caller.wait_idle()
                streams = [send(client, ask) for ask in ASKS]
                for stream in streams:
                    next(stream)
                assert [caller.load().running for caller in callers] == [6, 6]
                schedulers[0].kill()
            lost = 0
            for ask, stream in zip(ASKS, streams, strict=True):
                try:
                    check(ask, stream)
                except Unavailable:
                    lost += 1
            assert lost == 6
            # Asked again, all are answered by the one that is left.
            for ask in ASKS:
                check(ask, send(client, ask))
            callers[1].wait_idle()
