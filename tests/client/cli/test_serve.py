"""`tandem serve`: restarts, exit codes, signals and output."""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tandem.v1 import control_pb2, inference_pb2

from tandem_client.services import pair
from tests.client.fake_programs import (
    READY,
    STAYS,
    Programs,
    environment,
    listens,
    pid_in,
    serving_fakes,
    write_programs,
)
from tests.client.fake_service import WAIT_SECONDS, FakeService
from tests.rigs.authorities import Authority
from tests.rigs.fatal_signal import fatal_signal
from tests.rigs.fifo import Fifo
from tests.rigs.processes import popen
from tests.rigs.terminal import CTRL_C, Terminal


async def test_ready_is_the_last_line_after_both_programs_serve(service: FakeService, programs: Programs) -> None:
    service.model = "bundled"
    programs(scheduler=listens(service), worker=STAYS)
    async with serving_fakes(service) as output:
        last = await output.until(READY)
        assert last == f'own | ready: tandem generate --address {service.address} "Return the"'
        assert output.lines[-1] == last and "a toy of 4 million parameters" in output.lines[-3]
    assert output.end == (0, "")
    assert any(line == "scheduler | flags --exit-with-parent --of-scheduler" for line in output.lines)
    assert any(line == "worker | flags --exit-with-parent --of-worker" for line in output.lines)


@pytest.mark.parametrize("victim", ["scheduler", "worker"])
async def test_the_restart_of_a_killed_program_is_printed(
    service: FakeService, programs: Programs, victim: str
) -> None:
    programs(scheduler=listens(service), worker=STAYS)
    async with serving_fakes(service) as output:
        await output.until(READY)
        os.kill(pid_in(await output.until(f"{victim} | pid")), signal.SIGKILL)
        again = await output.until(READY, times=2)
        assert output.lines[-1] == again
    assert output.end[0] == 0
    assert [line for line in output.lines if "ended by" in line] == [
        f"own | the {victim} was ended by SIGKILL; it starts again in 0.0 s"
    ]
    survivor = "worker" if victim == "scheduler" else "scheduler"
    assert sum(f"{survivor} | pid" in line for line in output.lines) == 1


@pytest.mark.parametrize("last", ["", "gpu_worker: the phase; a hint"])
async def test_a_fatal_signal_is_told_without_pythons_stacks(
    service: FakeService, programs: Programs, last: str
) -> None:
    programs(scheduler=listens(service), worker=fatal_signal(last))
    async with serving_fakes(service, interrupts=False) as output:
        pass
    assert any(line.startswith('worker |   File "') for line in output.lines)
    told = last or "Fatal Python error: Segmentation fault"
    assert output.end == (1, f"the worker was ended by SIGSEGV before it served: {told}")


def not_serving(pid: int) -> control_pb2.GetLoadResponse:
    """A worker has joined and cannot load the service's weights."""
    refused = control_pb2.WorkerLoad(pid=pid, state=control_pb2.WORKER_STATE_REFUSED, detail="no such folder")
    return control_pb2.GetLoadResponse(
        not_serving="worker w-1 cannot load weights 'v2': no such folder",
        not_serving_reason=inference_pb2.WAIT_REASON_WEIGHTS_REFUSED,
        per_worker=[refused],
    )


async def test_ready_is_said_only_while_requests_are_computed(
    service: FakeService, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program ends, and the health check of a moment ago said SERVING."""
    monkeypatch.setattr(pair, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(pair, "_TELL_SECONDS", 0.01)
    programs(scheduler=listens(service), worker=STAYS)
    service.load = not_serving(0)
    async with serving_fakes(service) as output:
        pid = pid_in(await output.until("worker | pid"))
        service.load = not_serving(pid)
        await output.until("own | not serving: worker w-1 cannot load weights 'v2': no such folder")
        assert not any(READY in line for line in output.lines)
        service.load = None
        await output.until(READY)
        service.load = not_serving(pid)
        await output.until("own | not serving: ", times=2)
        service.load = None
        await output.until(READY, times=2)
    assert output.end[0] == 0


# The status 2 is that of wrong settings.
@pytest.mark.parametrize(
    ("status", "code", "words"), [(1, 1, " before it served"), (2, 2, ""), (3, 1, " before it served")]
)
@pytest.mark.parametrize("ends", ["scheduler", "worker"])
async def test_serve_ends_with_the_cause_of_a_program_that_never_served(
    service: FakeService, programs: Programs, ends: str, status: int, code: int, words: str
) -> None:
    """Meanwhile another service answers at the address."""
    life = f"say('2026-11-22 02:12:58.026 {ends} ERROR the cause'); sys.exit({status})"
    programs(**{"scheduler": listens(service), "worker": STAYS, ends: life})
    async with serving_fakes(service, interrupts=False) as output:
        pass
    assert output.end == (code, f"the {ends} ended with exit code {status}{words}: the cause")
    assert not any(READY in line for line in output.lines)


async def test_a_crash_loop_of_the_scheduler_ends_serve_with_the_cause(
    service: FakeService, programs: Programs
) -> None:
    programs(scheduler=listens(service, "say(f'cause {life}'); sys.exit(1)"), worker=STAYS)
    async with serving_fakes(service, interrupts=False) as output:
        pass
    cause = "the scheduler ended with exit code 1, 5 times within 60 s; it is not started again: cause 4"
    assert output.end == (1, cause)
    assert any("stopping all programs; tandem serve ends with exit code 1" in line for line in output.lines)
    assert sum("scheduler | pid" in line for line in output.lines) == 5


async def test_a_worker_that_has_served_is_restarted_without_a_limit(service: FakeService, programs: Programs) -> None:
    worker = f"if life == 0 or life == 8:\n    {STAYS}\nsys.exit(1)"
    programs(scheduler=listens(service), worker=worker)
    async with serving_fakes(service) as output:
        await output.until(READY)
        os.kill(pid_in(await output.until("worker | pid")), signal.SIGKILL)
        await output.until(READY, times=2)
    assert (output.end[0], sum("worker | pid" in line for line in output.lines)) == (0, 9)


async def test_a_second_interrupt_kills_a_program_that_does_not_stop(service: FakeService, programs: Programs) -> None:
    programs(scheduler=listens(service, "say('up'); signal.sigwait([signal.SIGHUP])"), worker=STAYS)
    async with serving_fakes(service) as output:
        await output.until("scheduler | up")
        os.kill(os.getpid(), signal.SIGINT)
        await output.until("SIGTERM again ends them at once")
    # A program that was just started may print another line after this one.
    assert output.end == (0, "")
    assert "own | stopping now: all requests end" in output.lines


async def test_a_drained_scheduler_ends_the_service_and_a_drained_worker_is_replaced(
    service: FakeService, programs: Programs
) -> None:
    drained = "signal.sigwait([signal.SIGTERM]); sys.exit(0)"
    programs(scheduler=listens(service, drained), worker=STAYS)
    async with serving_fakes(service) as output:
        await output.until(READY)
        # The fakes end with status 0, as programs do that were drained.
        os.kill(pid_in(await output.until("worker | pid")), signal.SIGTERM)
        await output.until(READY, times=2)
        os.kill(pid_in(await output.until("scheduler | pid")), signal.SIGTERM)
        await output.until("the service was drained")
    assert output.end == (0, "")
    assert sum("scheduler | pid" in line for line in output.lines) == 1
    assert "own | the worker ended with exit code 0; it starts again at once" in output.lines


@contextmanager
def serve_process(folder: Path, *flags: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs the command in a process, with the fakes of the folder."""
    # The fake worker is a module and has no holder of shared pools in it.
    ends = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    given = {"cwd": folder, "env": environment(folder), **ends, **options}
    process = popen("tandem_client.cli", "serve", "--shared-pool", "off", *flags, text=True, **given)
    try:
        yield process
    finally:
        process.kill()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.wait()


def holding(alive: Fifo) -> str:
    """The code of a program that holds the FIFO open until it ends."""
    return f"alive = open({str(alive.path)!r}, 'w'); alive.write('x'); alive.flush()\n"


def saying(fifo: Fifo, code: str) -> str:
    """The code of a program that writes this value."""
    return f"open({str(fifo.path)!r}, 'w').write({code})\n"


def test_kill_9_of_serve_ends_both_children(service: FakeService, tmp_path: Path) -> None:
    with Fifo(tmp_path / "alive") as alive:
        holds = holding(alive)
        write_programs(tmp_path, scheduler=holds + listens(service), worker=holds + STAYS)
        with serve_process(tmp_path, stdout=subprocess.DEVNULL) as process:
            assert alive.read(2) == "xx"
            process.send_signal(signal.SIGKILL)
            assert alive.read_to_end() == ""


def test_unread_output_does_not_stop_the_children(service: FakeService, tmp_path: Path) -> None:
    with Fifo(tmp_path / "done") as done:
        # These are more lines than the pipe and the queue hold.
        floods = f"for n in range(20_000):\n    say(f'{{n:100}}')\n{saying(done, repr('done'))}"
        write_programs(tmp_path, scheduler=listens(service), worker=floods + STAYS)
        with serve_process(tmp_path) as process:
            assert done.read_to_end() == "done"
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_SECONDS) == 0
            assert process.stdout is not None
            assert "worker | pid" in process.stdout.read()


def test_serve_runs_without_a_standard_output(service: FakeService, tmp_path: Path) -> None:
    # Not in a `preexec_fn`, for which Python forks: a test with a gRPC server has threads that do not survive that.
    closed = ("sh", "-c", 'exec "$@" >&-', "sh")
    with Fifo(tmp_path / "up") as up:
        write_programs(tmp_path, scheduler=listens(service), worker=saying(up, repr("up")) + STAYS)
        with serve_process(tmp_path, within=closed) as process:
            assert up.read_to_end() == "up"
            process.send_signal(signal.SIGINT)
            assert (process.wait(WAIT_SECONDS), process.stderr and process.stderr.read()) == (0, "")


def test_the_cause_is_printed_after_the_lines_of_the_children(service: FakeService, tmp_path: Path) -> None:
    """A child's own `ready` line is not shown, because the other child may not be ready."""
    said = "say('core INFO ready: tandem generate x'); say('scheduler_svc: listen: port is taken'); sys.exit(2)"
    write_programs(tmp_path, scheduler=said, worker=STAYS)
    with serve_process(tmp_path, stderr=subprocess.STDOUT) as process:
        out, _ = process.communicate(timeout=WAIT_SECONDS)
    last = "error: the scheduler ended with exit code 2: scheduler_svc: listen: port is taken"
    assert (process.returncode, out.splitlines()[-1]) == (2, last)
    assert "scheduler | scheduler_svc: listen: port is taken\n" in out and "ready" not in out


def test_the_json_format_reaches_both_programs_and_every_line(service: FakeService, tmp_path: Path) -> None:
    record = {"time": "t", "process": "worker", "pid": 1, "level": "ERROR", "message": "no GPU"}
    fifo = tmp_path / "up"
    os.mkfifo(fifo)
    scheduler = listens(service, f"open({str(fifo)!r}, 'w').close()\n{STAYS}")
    worker = f"open({str(fifo)!r}).read(); say('{{no json}}'); say({json.dumps(record)!r}); sys.exit(1)"
    write_programs(tmp_path, scheduler=scheduler, worker=worker)
    with serve_process(tmp_path, "--log-format", "json") as process:
        out, err = process.communicate(timeout=WAIT_SECONDS)
    lines = [json.loads(line) for line in out.splitlines()]
    assert record in lines
    flags = [line["message"] for line in lines if line["message"].startswith("flags ")]
    assert len(flags) == 2
    assert all(re.search(r"--log-format=json\b", line) for line in flags)
    assert all(set(line) == set(record) for line in lines)
    assert "{no json}" in [line["message"] for line in lines]
    [cause] = [json.loads(line) for line in err.splitlines()]
    assert cause["message"] == "error: the worker ended with exit code 1 before it served: no GPU"
    assert (cause["process"], cause["level"]) == ("serve", "ERROR")


def test_http_starts_a_gateway_before_the_scheduler_and_ends_it(service: FakeService, tmp_path: Path) -> None:
    write_programs(tmp_path, scheduler=listens(service), worker=STAYS)
    with serve_process(tmp_path, "--http", "127.0.0.1:0", stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        url = next(line for line in lines if "gateway listening on" in line).split()[-1]
        with urllib.request.urlopen(f"{url}/v1/models", timeout=WAIT_SECONDS) as answer:
            assert json.load(answer)["data"][0]["id"] == service.model
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 0
        with pytest.raises(OSError):
            urllib.request.urlopen(f"{url}/livez", timeout=WAIT_SECONDS)


@pytest.mark.parametrize(
    ("place", "names"),
    [("flags", ("DNS:*.example", "DNS:b.example")), ("scheduler", ("IP:127.0.0.1",)), ("variables", ())],
)
def test_http_with_tls_serves_with_the_certificate_of_the_service(
    tmp_path: Path, place: str, names: tuple[str, ...]
) -> None:
    pair = Authority(tmp_path).issue("tandem.test", *names)
    service = FakeService(pair.of_server())
    port = service.address.rpartition(":")[2]
    said = f"core INFO frontend listening on 0.0.0.0:{port}"
    write_programs(tmp_path, scheduler=f"say({said!r})\n{STAYS}", worker=STAYS)
    tls = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    flags = {"flags": tls, "scheduler": ["--scheduler", " ".join(tls)], "variables": list[str]()}[place]
    variables = {f"TANDEM_SCHEDULER_{tls[i][2:].replace('-', '_').upper()}": tls[i + 1] for i in (0, 2)}
    more = {"env": {**environment(tmp_path), **variables}} if place == "variables" else {}
    with serve_process(tmp_path, "--http", "127.0.0.1:0", *flags, stderr=subprocess.STDOUT, **more) as process:
        assert process.stdout is not None
        url = next(line for line in process.stdout if "gateway listening on" in line).split()[-1]
        trust = pair.trust()
        trust.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        asked = urllib.request.Request(f"{url}/v1/models", headers={"authorization": "Bearer k"})
        with urllib.request.urlopen(asked, timeout=WAIT_SECONDS, context=trust) as answer:
            assert json.load(answer)["data"][0]["id"] == service.model
    service.stop()


def test_http_with_client_certificates_needs_one_of_the_gateway(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("service", "IP:127.0.0.1")
    service = FakeService(pair.of_server(authority.certificate))
    write_programs(tmp_path, scheduler=listens(service), worker=STAYS)
    tls = (f"--tls-cert={pair.certificate}", f"--tls-key={pair.key}", f"--tls-client-ca={authority.certificate}")
    with serve_process(tmp_path, "--http", "127.0.0.1:0", *tls) as process:
        _, said = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 2 and "wants a certificate of its clients; give --service-cert" in said
    own = authority.issue("gateway", "DNS:gateway")
    more = f"--service-cert {own.certificate} --service-key {own.key}"
    with serve_process(tmp_path, "--http", "127.0.0.1:0", *tls, "--gateway", more) as process:
        assert process.stdout is not None
        assert any("gateway listening on https://" in line for line in process.stdout)
    service.stop()


def test_wrong_flags_of_the_gateway_end_serve(service: FakeService, tmp_path: Path) -> None:
    write_programs(tmp_path, scheduler=listens(service), worker=STAYS)
    with serve_process(tmp_path, "--http", "127.0.0.1:0", "--gateway", "--processes 0") as process:
        _, said = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == 2 and "--processes is 0" in said


def on_terminal(folder: Path, *flags: str) -> Terminal:
    """The command with the fakes of the folder, on a terminal."""
    command = [sys.executable, "-m", "tandem_client.cli", "serve", "--shared-pool", "off", "--runtime-dir"]
    in_folder = {**environment(folder), "TERM": "xterm", "NO_COLOR": "1"}
    return Terminal([*command, str(folder / "run"), *flags], in_folder, columns=120)


def test_a_terminal_shows_what_explains_a_failed_start_once_and_where_the_log_is(
    service: FakeService, tmp_path: Path
) -> None:
    lines = (
        "2026-11-22 02:12:58.026 worker INFO imports  1.00 s",
        "2026-11-22 02:12:58.026 worker ERROR the worker stops because of an unexpected error",
        "    Traceback (most recent call last):", "    KeyError: \x1b[2J", "gpu_worker: KeyError; a hint",
    )  # fmt: skip
    fails = f"for line in {lines!r}: say(line)\nsys.exit(1)"
    write_programs(tmp_path, scheduler=listens(service), worker=fails)
    with on_terminal(tmp_path) as terminal:
        terminal.expect("error: .*\r\n")
        code = terminal.expect_end()
    log = tmp_path / "run" / "serve.log"
    shown = [re.sub(r"\x1b\[[\d?;]*[A-Za-z]", "", line).rpartition("\r")[2] for line in terminal.seen.split("\r\n")]
    begin = next(number for number, line in enumerate(shown) if line.startswith("✗ "))
    assert code == 1
    # The first two lines of each fake do not belong to a log either.
    assert [line for line in shown[begin + 1 :] if line and not re.match("  (flags|pid) ", line)] == [
        "  2026-11-22 02:12:58.026 worker ERROR the worker stops because of an unexpected error",
        "      Traceback (most recent call last):",
        "      KeyError: \\x1b[2J",
        "stopping all programs; tandem serve ends with exit code 1",
        f"  more in {log}",
        "error: the worker ended with exit code 1 before it served: gpu_worker: KeyError; a hint",
    ]
    assert "   worker | gpu_worker: KeyError; a hint\n" in log.read_text()


def test_ctrl_c_while_the_programs_start_ends_them_and_is_said_once(service: FakeService, tmp_path: Path) -> None:
    with Fifo(tmp_path / "alive") as alive:
        holds = holding(alive)
        write_programs(tmp_path, scheduler=holds + STAYS, worker=holds + STAYS)
        with on_terminal(tmp_path) as terminal:
            assert alive.read(2) == "xx"
            terminal.type(CTRL_C)
            code = terminal.expect_end()
            assert alive.read_to_end() == ""
    assert (code, terminal.seen.count("stopping")) == (0, 1)
    assert "ready" not in terminal.seen and "error" not in terminal.seen


def test_a_terminal_says_that_a_program_was_restarted_and_that_it_is_ready_again(
    service: FakeService, tmp_path: Path
) -> None:
    with Fifo(tmp_path / "pid") as pid:
        # That which the service reports as its worker's.
        write_programs(tmp_path, scheduler=listens(service), worker=saying(pid, "str(os.getpid())") + STAYS)
        with on_terminal(tmp_path) as terminal:
            service.worker_pids = [int(pid.read_to_end())]
            terminal.expect("ready after .*\r\n")
            os.kill(service.worker_pids[0], signal.SIGKILL)
            service.worker_pids = [int(pid.read_to_end())]
            terminal.expect("ready again")
            terminal.type(CTRL_C)
            assert terminal.expect_end() == 0
    assert "the worker was ended by SIGKILL; it starts again in" in terminal.seen


@pytest.mark.parametrize("flags", [("--verbose",), ("--log-format=json",)])
def test_a_terminal_shows_all_lines_if_it_is_asked_to(service: FakeService, tmp_path: Path, flags: list[str]) -> None:
    os.mkfifo(tmp_path / "listens")
    told, awaited = (f"open({str(tmp_path / 'listens')!r}, {mode!r}).close()\n" for mode in "wr")
    worker = f"{awaited}say('gpu_worker: enough'); sys.exit(2)"
    write_programs(tmp_path, scheduler=listens(service, told + STAYS), worker=worker)
    with on_terminal(tmp_path, *flags) as terminal:
        assert terminal.expect_end() == 2
    assert "frontend listening on" in terminal.seen and "\x1b" not in terminal.seen
    assert not (tmp_path / "run" / "serve.log").exists()


def test_lines_without_a_terminal_have_no_control_characters_and_repeats_are_counted(
    service: FakeService, tmp_path: Path
) -> None:
    worker = "for n in range(38):\n    say('\\x1b[2Jagain')\nsay('gpu_worker: enough'); sys.exit(2)"
    write_programs(tmp_path, scheduler=listens(service), worker=worker)
    with serve_process(tmp_path, stderr=subprocess.STDOUT) as process:
        out, _ = process.communicate(timeout=WAIT_SECONDS)
    assert [line for line in out.splitlines() if "again" in line] == [
        "   worker | \\x1b[2Jagain",
        "   worker | repeated 37 times: \\x1b[2Jagain",
    ]
    assert all(line.isprintable() for line in out.splitlines())
