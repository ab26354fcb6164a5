"""The whole service with tokens and TLS: two tenants, revoked tokens, probes, and what the log says."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tandem_client import Client, TlsSettings, errors
from tandem_client.types import AbortOutcome
from tests.rigs.authorities import Authority
from tests.rigs.processes import Rig, SchedulerProcess, child_environment, run
from tests.rigs.waiting import TIMEOUT_SECONDS, until

PROMPT = [3, 4, 5]


class Tenants:
    """The token file of a test, made with `tandem token new`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, str] = {}
        self._tokens: dict[str, str] = {}

    def add(self, name: str, *rights: str) -> str:
        """Draws a token of a tenant; the first with these rights."""
        words = [word for right in rights for word in ("--rights", right)]
        done = run("tandem_client.cli", "token", "new", "--tenant", name, *words)
        token = done.stderr.split()[-1]
        self._entries[token] = done.stdout
        return token

    def revoke(self, token: str) -> None:
        del self._entries[token]

    def write(self, more: str = "") -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text("\n".join(self._entries.values()) + more)
        fresh.chmod(0o600)
        fresh.rename(self.path)

    @property
    def all(self) -> list[str]:
        return list(self._entries)


def refused(client: Client, kind: type[errors.TandemError]) -> bool:
    try:
        client.model_info(timeout=TIMEOUT_SECONDS)
    except errors.TandemError as error:
        return isinstance(error, kind)
    return False


def test_two_tenants_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("service", "DNS:tandem.test")
    tls = TlsSettings(ca=authority.certificate, server_name="tandem.test")
    tenants = Tenants(tmp_path / "tokens.toml")
    acme, other, control = tenants.add("acme"), tenants.add("other"), tenants.add("ops", "control")
    tenants.write("\n[tenants.acme]\npriority = [0, 3]\nmax_new_tokens = 5000\n")
    everything = [*tenants.all, "tandem_wrong"]
    with Rig() as rig:
        rig.worker("--step-ms", "50", late=False)
        files = ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key), "--tokens", str(tenants.path))
        scheduler = rig.scheduler(
            *files, "--log-level", "debug", "--health-listen", "127.0.0.1:0", "--record", str(tmp_path / "log"),
            listen="0.0.0.0:0",
        )  # fmt: skip
        port = scheduler.address.rpartition(":")[2]

        def client(token: str | None) -> Client:
            return Client(f"127.0.0.1:{port}", token=token, tls=tls)

        probe = scheduler.wait_line(r"health listening on (\S+)").group(1)
        with grpc.insecure_channel(probe) as channel:
            for answer in channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=TIMEOUT_SECONDS):
                if health_pb2.HealthCheckResponse.FromString(answer).status == 1:
                    break
        with (
            client(acme) as mine,
            client(other) as theirs,
            client(control) as operator,
            client("tandem_wrong") as wrong,
        ):
            assert refused(wrong, errors.Unauthenticated)
            with pytest.raises(errors.PermissionDenied):
                mine.load()
            with pytest.raises(errors.PermissionDenied):
                operator.tokenize("a")
            with pytest.raises(errors.InvalidArgument, match="priority is 4; it must be between 0 and 3"):
                list(mine.generate(PROMPT, priority=4))
            _ready_line_works(scheduler, acme)
            _same_ids(mine, theirs, operator)
            _same_prompts_share_nothing(mine, theirs)
            tenants.revoke(other)
            tenants.write()
            until(lambda: refused(theirs, errors.Unauthenticated))
            assert not refused(mine, errors.Unauthenticated)
            tenants.path.write_text("nonsense")
            scheduler.wait_line("stay in force")
            assert not refused(mine, errors.Unauthenticated)
        assert scheduler.terminate() == 0
        rig.check_record(tmp_path / "log", audited=True)
        lines = "\n".join(child.output() for child in rig.children)
        assert not [token for token in everything if token in lines]


def _ready_line_works(scheduler: SchedulerProcess, token: str) -> None:
    """The command of the ready line, as `tandem health`, in a shell of its own."""
    line = scheduler.wait_line(r"ready: (.*) \"Return the\"").group(1)
    assert "tandem_" not in line
    command = f'tandem() {{ {sys.executable} -m tandem_client.cli "$@"; }}\n{line.replace("generate", "health")}'

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        environment = {**child_environment(), **more}
        return subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment, cwd="/")

    assert "TANDEM_TOKEN: is not set" in run().stderr
    done = run(TANDEM_TOKEN=token)
    assert done.returncode == 0, done.stderr
    assert "serving" in done.stdout.lower()


def _same_ids(mine: Client, theirs: Client, operator: Client) -> None:
    """One id in two tenants: each ends its own only, and the operator every one."""

    def end_of(client: Client) -> object:
        running = client.generate(PROMPT, request_id="same", max_new_tokens=200, ignore_eos=True)
        for _ in running:
            pass
        return running.finished.reason  # pyright: ignore[reportOptionalMemberAccess]

    threads = ThreadPoolExecutor(2)
    first = threads.submit(end_of, mine)
    until(lambda: operator.load().running == 1)
    with pytest.raises(errors.AlreadyExists):
        list(mine.generate(PROMPT, request_id="same"))
    # The answer for another tenant's id is that for an unused id.
    for ids in (("same", "acme/same"), ("nobody", "acme/nobody"), ("same", "nobody")):
        assert theirs.abort(*ids) == dict.fromkeys(ids, AbortOutcome.NOT_FOUND)
    second = threads.submit(end_of, theirs)
    until(lambda: operator.load().running == 2)
    assert theirs.abort("same") == {"same": AbortOutcome.ABORTED}
    assert second.result(TIMEOUT_SECONDS) == "aborted"
    assert operator.abort("same") == {"same": AbortOutcome.NOT_FOUND}
    assert operator.abort("acme/same") == {"acme/same": AbortOutcome.ABORTED}
    assert first.result(TIMEOUT_SECONDS) == "aborted"
    threads.shutdown()


def _same_prompts_share_nothing(mine: Client, theirs: Client) -> None:
    """A tenant hits its own cached pages and no other tenant's, with the same salt."""
    prompt = list(range(10, 74))

    def cached(client: Client) -> int:
        stream = client.generate(prompt, max_new_tokens=2, cache_salt="s")
        list(stream)
        assert stream.summary is not None
        return stream.summary.usage.cached_prompt_tokens

    assert cached(mine) == 0
    assert cached(mine) > 0
    assert cached(theirs) == 0
    assert cached(theirs) > 0


def test_settings_that_are_missing_are_named(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("service")
    tokens = tmp_path / "t.toml"
    tokens.write_text("[tenants.a]")
    tokens.chmod(0o600)
    tls = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    needed: list[tuple[list[str], str]] = [
        ([], "--tls-cert, --tls-key and --tokens are"),
        (tls, "--tokens is"),
        (["--tokens", str(tokens)], "--tls-cert and --tls-key are"),
    ]
    for flags, missing in needed:
        with Rig() as rig:
            scheduler = rig.launch_scheduler(*flags, listen="0.0.0.0:0")
            scheduler.wait_line(f"listen: {missing} missing: without TLS and tokens")
            assert scheduler.wait() == 2
            rig.children.clear()
