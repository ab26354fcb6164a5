"""A service with any of its features, streams of every kind through it, and the deaths of its processes meanwhile.

Owns which features and events there are and go together, and what a stream must survive. The worker is the real link
around the content-checking executor; where pages or ranks matter it is the real one with the bundled model.
"""

import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from typing import Self

import httpx2 as httpx
import psutil

from tandem_client import Client, TlsSettings
from tandem_client.errors import NotFound, Unavailable
from tandem_client.sync_client import GenerateStream
from tandem_client.types import FinishReason
from tests.rigs import byte_tokenizer
from tests.rigs.authorities import MountedCertificate
from tests.rigs.door import token_file
from tests.rigs.oracle import complete
from tests.rigs.processes import Child, Rig, SchedulerProcess, ranks_of, run
from tests.rigs.waiting import LINGER_SECONDS, until
from tests.system.real_service import TIMEOUT_SECONDS, prompts

PAGE_SIZE, NUM_STREAMS, NEW_TOKENS = 16, 8, 112
# A stream without a maximum ends here, with some tokens more than the others.
MAX_LENGTH = 176
_SHAPE = (
    f"--page-size {PAGE_SIZE} --num-pages 240 --max-rows {NUM_STREAMS} --max-length {MAX_LENGTH} --token-budget 128"
)
_CHECKING = ("--step-ms", "3")
_TENANTS = {"first": "tandem_first", "second": "tandem_second"}


class Feature(StrEnum):
    """What a service may have besides one front end and one worker."""

    JOURNAL = "journal"
    SHARED_POOL = "shared pool"
    STANDBY = "standby"
    FRONT_ENDS = "two front ends"
    TENANTS = "tenants"
    # Beside several front ends it has several processes.
    GATEWAY = "gateway"
    TLS = "TLS"
    RANKS = "ranks 2"


# The worker refuses these.
_EXCLUDED = (
    frozenset({Feature.RANKS, Feature.SHARED_POOL}),
    frozenset({Feature.RANKS, Feature.STANDBY}),
)
# Computed by the real worker.
_REAL_FEATURES = frozenset({Feature.SHARED_POOL, Feature.RANKS})


class Event(StrEnum):
    """What happens under streams. A service goes through its events in this order, so most meet its fourth start."""

    FIRST_WORKER = "kill worker"
    CLEAN_RESTART = "clean restart"
    SECOND_START = "kill scheduler"
    THIRD_START = "kill scheduler again"
    FRONT_END = "kill front end"
    FRONT_ENDS = "kill all front ends"
    WORKER = "kill worker of a later start"
    RANK = "kill rank"
    HOLDER = "kill holder"
    GATEWAY = "kill gateway"
    STANDBY = "kill standby"
    SCHEDULER_AND_WORKER = "kill scheduler and worker"
    CERTIFICATE = "replace certificate"
    STOP = "SIGTERM to every process"
    # The service is whole after the last death.
    NOTHING = "nothing"


_NEEDS = {
    Event.RANK: Feature.RANKS,
    Event.HOLDER: Feature.SHARED_POOL,
    Event.GATEWAY: Feature.GATEWAY,
    Event.STANDBY: Feature.STANDBY,
    Event.FRONT_ENDS: Feature.FRONT_ENDS,
    Event.CERTIFICATE: Feature.TLS,
}
# A standby worker must be there; else it may still start, and end because it finds no holder.
_WITH_STANDBY = (Event.FIRST_WORKER, Event.WORKER, Event.HOLDER, Event.STANDBY, Event.NOTHING)
Features = frozenset[Feature]


def events_of(features: Features) -> list[Event]:
    """The events that a service with these features can meet."""
    return [event for event in Event if event not in _NEEDS or _NEEDS[event] in features]


def go_together(features: Features) -> bool:
    """Whether a service may have all of them."""
    return not any(excluded <= features for excluded in _EXCLUDED)


def pairs() -> list[Features]:
    """Every two features that go together."""
    return [pair for pair in map(frozenset[Feature], combinations(Feature, 2)) if go_together(pair)]


def covering() -> list[Features]:
    """Few services that have every pair between them, each with as many features as go together."""
    found, missing = list[Features](), pairs()
    while missing:
        features = missing[0]
        for feature in Feature:
            if go_together(features | {feature}):
                features |= {feature}
        found.append(features)
        missing = [pair for pair in missing if not pair <= features]
    return found


class Kind(StrEnum):
    """How a stream is read."""

    RESUMING = "resuming"
    # Resuming, and without a maximum of tokens.
    UNSET = "unset maximum"
    PLAIN = "plain"
    HTTP = "HTTP"


_RESUMING = (Kind.RESUMING, Kind.UNSET)


def survives(kind: Kind, event: Event, features: Features) -> bool:
    """Whether a stream must go on to its end."""
    match event:
        case Event.SECOND_START | Event.THIRD_START | Event.SCHEDULER_AND_WORKER:
            return kind in _RESUMING and Feature.JOURNAL in features
        case Event.FRONT_END | Event.FRONT_ENDS:
            return kind in _RESUMING
        case Event.GATEWAY:
            return kind is not Kind.HTTP
        case _:
            return True


@dataclass(slots=True, kw_only=True, eq=False)
class _Reader:
    """A stream, and what it has read so far."""

    kind: Kind
    text: str
    tokens: list[int] = field(default_factory=list[int])
    error: Exception | None = None
    stream: GenerateStream | None = None


class Service:
    """A service with these features, and callers of it. Entering starts it; leaving ends and checks it."""

    def __init__(self, features: Features) -> None:
        self.features, self.is_real = features, bool(features & _REAL_FEATURES)
        self._texts = prompts()[:NUM_STREAMS]
        self._changed = threading.Condition()
        self._truth = list[list[int]]()

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        with self._stack:
            self.rig = self._stack.enter_context(Rig())
            self._start()
            readers = self._read(self._check_list)
            self._truth = [reader.tokens for reader in readers]
            if not self.is_real:
                assert self._truth == list(map(_oracle, readers))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    # Processes ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if Feature.TLS in self.features:
            self._certificate = MountedCertificate(self.rig.runtime_dir)
        self._start_workers()
        tokens: list[str | None] = [None]
        if Feature.TENANTS in self.features:
            token_file(self.rig.runtime_dir, _TENANTS, rights=("inference", "control"))
            tokens = [*_TENANTS.values()]
        self._scheduler = self._start_scheduler("127.0.0.1:0")
        tls = TlsSettings(ca=self._certificate.authority) if Feature.TLS in self.features else None
        self._clients = [
            self._stack.enter_context(Client(self._scheduler.address, token=token, tls=tls, max_retries=20))
            for token in tokens
        ]
        self._token = tokens[0] or "none"
        if Feature.GATEWAY in self.features:
            self._gateway, self._url = self._start_gateway("127.0.0.1:0")
        self._wait_restored()

    def _start_workers(self) -> None:
        if Feature.SHARED_POOL in self.features:
            self._holder = self.rig.holder()
        self._workers = [self._start_worker()]
        if Feature.STANDBY in self.features:
            self._workers.append(self._start_worker(on_standby=True))
        for worker in self._workers:
            worker.wait_line("wait(s|ing) for a scheduler", TIMEOUT_SECONDS)

    def _start_worker(self, *, on_standby: bool = False) -> Child:
        flags = ["--standby"] if on_standby else []
        if not self.is_real:
            return self.rig.worker(*_SHAPE.split(), *_CHECKING, *flags, program="tests.rigs.linked_worker")
        flags += ["--shared-pool", "on"] if Feature.SHARED_POOL in self.features else []
        flags += ["--ranks", "2"] if Feature.RANKS in self.features else []
        return self.rig.real_worker(*_SHAPE.split(), *flags)

    def _start_scheduler(self, address: str) -> SchedulerProcess:
        flags = list[str]()
        if Feature.JOURNAL in self.features:
            flags += ["--journal", str(self.rig.runtime_dir / "journal")]
        self._num_front_ends = 2 if Feature.FRONT_ENDS in self.features else 1
        flags += [f"--frontends={self._num_front_ends}"]
        if Feature.TENANTS in self.features:
            flags += ["--tokens", str(self.rig.runtime_dir / "tokens.toml")]
        if Feature.TLS in self.features:
            flags += [f"--tls-cert={self._certificate.pair.certificate}"]
            flags += [f"--tls-key={self._certificate.pair.key}"]
        return self.rig.scheduler(*flags, listen=address)

    def _start_gateway(self, address: str) -> tuple[Child, str]:
        flags = ["--listen", address, "--address", self._scheduler.address, "--exit-with-parent"]
        flags += [f"--processes={2 if Feature.FRONT_ENDS in self.features else 1}"]
        flags += [f"--service-ca={self._certificate.authority}"] if Feature.TLS in self.features else []
        child = self.rig.start("gateway", "tandem_client.gateway", *flags)
        return child, child.wait_line(r"gateway listening on (http\S+)$", TIMEOUT_SECONDS).group(1)

    def _wait_restored(self) -> None:
        """Waits until the service serves again, and no request is left."""
        for client in self._clients:
            client.wait_ready(TIMEOUT_SECONDS)
        # A front end that listens and has no tokenizer yet refuses calls, and not every caller tries again.
        until(lambda: sum("tokens a sequence" in line for line in self._scheduler.lines) >= self._num_front_ends)
        caller = self._clients[0]
        until(lambda: (load := caller.load()).running == load.waiting == 0)
        load = caller.load()
        assert (load.suspects, load.pages_used) == (0, 0), load
        assert self._listed() == 0
        if Feature.GATEWAY in self.features:
            with self._http() as http:
                until(lambda: http.get("/v1/models").status_code == 200)

    def _unfinished(self) -> int:
        load = self._clients[0].load()
        return load.running + load.waiting

    def _listed(self) -> int:
        """Counts the requests in the list that wait or run."""
        return len(list(self._clients[0].all_requests(states=["waiting", "running"])))

    def _check_list(self) -> None:
        """The list holds what the load counts, of all front ends and tenants."""
        before, listed, after = self._unfinished(), self._listed(), self._unfinished()
        assert after <= listed <= before, (before, listed, after)

    def _list_by_command(self) -> None:
        """`tandem requests` has each stream that can be resumed, also one that has just ended."""
        self._check_list()
        states = [f"--state={state}" for state in ("waiting", "running", "kept")]
        variables = {"TANDEM_ADDRESS": self._scheduler.address, "TANDEM_TOKEN": self._token}
        if Feature.TLS in self.features:
            variables["TANDEM_TLS_CA"] = str(self._certificate.authority)
        done = run("tandem_client.cli", "requests", "--json", *states, **variables)
        assert done.returncode == 0, done.stderr
        streams = [reader.stream for reader in self._readers if reader.kind in _RESUMING]
        ids = {stream.accepted.request_id for stream in streams if stream is not None and stream.accepted is not None}
        assert len(ids) == len(streams) and ids <= {each["request_id"] for each in json.loads(done.stdout)}

    def _http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self._token}"}
        return httpx.Client(base_url=self._url, headers=headers, timeout=TIMEOUT_SECONDS)

    # Streams -----------------------------------------------------------------------------------------------------

    def check(self, event: Event) -> None:
        """Lets the event happen under streams. Each has exact tokens, whole if it must survive, or else a part."""
        print(f"{event}: ", end="")
        if event in _WITH_STANDBY and Feature.STANDBY in self.features:
            until(lambda: self._clients[0].load().standby_workers == 1)
        readers = self._read(self._events[event])
        for reader, truth in zip(readers, self._truth, strict=True):
            what = f"{reader.kind} stream of {reader.text!r} and {event}"
            if survives(reader.kind, event, self.features) or reader.error is None:
                assert reader.error is None, f"{what}: {reader.error!r}"
                assert reader.tokens == truth, what
                if reader.kind is Kind.UNSET and reader.stream is not None:
                    finished = reader.stream.finished
                    assert finished is not None and finished.reason is FinishReason.CONTEXT_FULL, what
            else:
                assert isinstance(reader.error, _LOSSES), f"{what}: {reader.error!r}"
                assert reader.tokens == truth[: len(reader.tokens)], what
        self._wait_restored()
        if event in (Event.FIRST_WORKER, Event.WORKER) and Feature.SHARED_POOL in self.features:
            # If no request waits for it, the next worker looks at the pool a moment later.
            until(lambda: (held := self._clients[0].load().held_pools).taken_over + held.pools == 1)
            assert not self._clients[0].load().held_pools.damaged_pages
        if event in (Event.CLEAN_RESTART, Event.STOP) and Feature.JOURNAL in self.features:
            self._resume_ended(readers)

    def _resume_ended(self, readers: list[_Reader]) -> None:
        """What has ended before a restart can be read after it."""
        for number, reader in enumerate(readers):
            if reader.stream is not None and reader.stream.accepted is not None and reader.kind in _RESUMING:
                accepted = reader.stream.accepted
                again = self._client(number).resume(accepted.request_id, accepted.resume_secret)
                assert [token for delta in again for token in delta.token_ids] == reader.tokens

    def _read(self, happens: Callable[[], object]) -> list[_Reader]:
        """Reads a stream of each text at once; all have begun when `happens` is called."""
        kinds = [Kind.RESUMING, Kind.PLAIN, *([Kind.HTTP] if Feature.GATEWAY in self.features else []), Kind.UNSET]
        readers = [_Reader(kind=kinds[i % len(kinds)], text=text) for i, text in enumerate(self._texts)]
        self._readers = readers
        with ThreadPoolExecutor(len(readers)) as threads:
            tasks = [threads.submit(self._follow, number, reader) for number, reader in enumerate(readers)]
            with self._changed:
                begun = self._changed.wait_for(
                    lambda: all(len(reader.tokens) > PAGE_SIZE or reader.error for reader in readers), TIMEOUT_SECONDS
                )
            assert begun, "not all streams begin"
            num_met = sum(not task.done() for task in tasks)
            happens()
            for task in tasks:
                task.result(TIMEOUT_SECONDS)
        num_lost = sum(reader.error is not None for reader in readers)
        print(f"{num_met} of {len(readers)} streams ran, and {num_lost} were lost")
        return readers

    def _follow(self, number: int, reader: _Reader) -> None:
        tokens = self._http_tokens(reader) if reader.kind is Kind.HTTP else self._client_tokens(number, reader)
        try:
            for some in tokens:
                with self._changed:
                    reader.tokens += some
                    self._changed.notify_all()
        except Exception as error:  # judged by `check`
            with self._changed:
                reader.error = error
                self._changed.notify_all()

    def _client(self, number: int) -> Client:
        return self._clients[number % len(self._clients)]

    def _client_tokens(self, number: int, reader: _Reader) -> Iterator[Sequence[int]]:
        resumes, maximum = reader.kind in _RESUMING, None if reader.kind is Kind.UNSET else NEW_TOKENS
        reader.stream = self._client(number).generate(
            reader.text, temperature=0.0, max_new_tokens=maximum, ignore_eos=True, timeout=TIMEOUT_SECONDS,
            resume=resumes, linger_seconds=LINGER_SECONDS if resumes else None,
        )  # fmt: skip
        for delta in reader.stream:
            yield delta.token_ids

    def _http_tokens(self, reader: _Reader) -> Iterator[Sequence[int]]:
        body = {
            "model": "", "prompt": reader.text, "max_tokens": NEW_TOKENS, "temperature": 0.0, "stream": True,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        with self._http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise _HttpFailure(answer.read().decode())
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise _HttpFailure(line)
                for choice in chunk["choices"]:
                    yield choice.get("token_ids") or []

    # Events ------------------------------------------------------------------------------------------------------

    @property
    def _events(self) -> dict[Event, Callable[[], None]]:
        return {
            Event.FIRST_WORKER: self._kill_worker,
            Event.CLEAN_RESTART: self._restart,
            Event.SECOND_START: self._kill_scheduler,
            Event.THIRD_START: self._kill_scheduler,
            Event.FRONT_END: self._kill_front_end,
            Event.FRONT_ENDS: self._kill_front_ends,
            Event.WORKER: self._kill_worker,
            Event.RANK: self._kill_rank,
            Event.HOLDER: self._kill_holder,
            Event.GATEWAY: self._kill_gateway,
            Event.STANDBY: self._kill_standby,
            Event.SCHEDULER_AND_WORKER: self._kill_scheduler_and_worker,
            Event.CERTIFICATE: self._replace_certificate,
            Event.STOP: self._stop_all,
            Event.NOTHING: self._list_by_command,
        }

    def _restart(self) -> None:
        address = self._scheduler.address
        assert self._scheduler.terminate(TIMEOUT_SECONDS) == 0
        self._scheduler = self._start_scheduler(address)

    def _kill_scheduler(self) -> None:
        address = self._scheduler.address
        self._scheduler.kill_with_frontends()
        self._scheduler = self._start_scheduler(address)

    def _kill_scheduler_and_worker(self) -> None:
        self._kill_worker(after=self._kill_scheduler)

    def _kill_front_end(self) -> None:
        """The one with the most callers."""
        self._lose([max(self._scheduler.frontends(), key=lambda each: len(each.net_connections("tcp")))])

    def _kill_front_ends(self) -> None:
        """All at once: each next one gets the settings again, in a pipe of its own."""
        front_ends = self._scheduler.frontends()
        self._lose(front_ends)
        now = self._scheduler.frontends()
        assert len(now) == len(front_ends) and not {each.pid for each in now} & {each.pid for each in front_ends}

    def _lose(self, front_ends: Sequence[psutil.Process]) -> None:
        num_lines = len(self._scheduler.lines)
        self._num_front_ends += len(front_ends)
        for each in front_ends:
            each.kill()
        self._scheduler.wait_line("frontend listening on", TIMEOUT_SECONDS, after=num_lines)

    def _kill_worker(self, after: Callable[[], object] = int) -> None:
        self._replace(self._clients[0].load().worker_pid, after)

    def _kill_standby(self) -> None:
        [standby] = [worker for worker in self._clients[0].load().per_worker if worker.is_standby]
        self._replace(standby.pid)

    def _replace(self, pid: int, after: Callable[[], object] = int) -> None:
        """Kills a worker, and starts another one when `after` has returned."""
        [worker] = [worker for worker in self._workers if worker.pid == pid]
        self._workers.remove(worker)
        worker.kill()
        after()
        self._workers.append(self._start_worker(on_standby=Feature.STANDBY in self.features))

    def _kill_rank(self) -> None:
        [launcher] = self._workers
        num_lines = len(launcher.lines)
        ranks_of(launcher)[-1].kill()
        launcher.wait_line("joined the scheduler", TIMEOUT_SECONDS, after=num_lines)

    def _replace_certificate(self) -> None:
        """New connections get the new one; those that are open go on."""
        self._certificate.replace()
        # Of several front ends, each looks by itself.
        address, newest = self._scheduler.address, self._certificate.newest
        until(lambda: {self._certificate.shown_at(address) for _ in range(8)} == {newest})

    def _stop_all(self) -> None:
        """As a supervisor of the system does; then everything starts again."""
        if Feature.STANDBY in self.features:
            # One that has not joined yet would end by the signal.
            until(lambda: self._clients[0].load().standby_workers == 1)
        children = [self._scheduler, *self._workers]
        children += [self._holder] if Feature.SHARED_POOL in self.features else []
        children += [self._gateway] if Feature.GATEWAY in self.features else []
        every = [psutil.Process(child.pid) for child in children]
        every += [each for process in every for each in process.children(recursive=True)]
        for process in every:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        for child in children:
            assert child.wait(TIMEOUT_SECONDS) == 0, child.output()
        _, left = psutil.wait_procs(every, timeout=TIMEOUT_SECONDS)
        assert not left, left
        self._start_workers()
        self._scheduler = self._start_scheduler(self._scheduler.address)
        if Feature.GATEWAY in self.features:
            self._gateway, self._url = self._start_gateway(self._url.removeprefix("http://"))

    def _kill_holder(self) -> None:
        self._holder.kill()
        self._holder = self.rig.holder()

    def _kill_gateway(self) -> None:
        self._gateway.kill()
        self._gateway, self._url = self._start_gateway(self._url.removeprefix("http://"))


class _HttpFailure(Exception):
    """The gateway's answer is an error."""


# What a caller may get when something that it needs has died.
_LOSSES = (Unavailable, NotFound, httpx.HTTPError, _HttpFailure)


def _oracle(reader: _Reader) -> list[int]:
    """The content-checking worker's tokens."""
    prompt = tuple(reader.text.encode())
    count = MAX_LENGTH - len(prompt) if reader.kind is Kind.UNSET else NEW_TOKENS
    return list(complete(prompt, max_new_tokens=count, vocab=byte_tokenizer.NUM_DRAWN, ignore_eos=True).tokens)
