"""The metrics page of the whole service: its sums are those of the Summaries, while workers and front ends die."""

import random
import ssl
import time
import urllib.error
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tandem.v1 import inference_pb2 as pb

from tandem_client import Client, TlsSettings, errors
from tests.rigs.authorities import Authority
from tests.rigs.metrics_page import MetricsPage, fetch, wait_page
from tests.rigs.processes import Rig, SchedulerProcess
from tests.rigs.restarting import RestartingWorkers
from tests.rigs.streams import Caller, Stream
from tests.rigs.transcript import Transcript
from tests.rigs.waiting import TIMEOUT_SECONDS, until
from tests.system.asks import Ask, random_asks
from tests.system.test_door import Tenants

# Too few pages for all rows, so that requests are preempted.
SHAPE = (
    *("--page-size", "16", "--num-pages", "40", "--max-rows", "16", "--max-length", "512"),
    *("--token-budget", "64", "--step-ms", "1"),
)
OPEN = 24


def page_url(scheduler: SchedulerProcess) -> str:
    return scheduler.wait_line(r"metrics at (\S+)").group(1)


def asks_of(num_requests: int) -> list[Ask]:
    """Requests of all kinds; every fourth has a stop string that its own text contains, or several samples."""
    asks = random_asks(num_requests, seed=14, prompts=(1, 60), outputs=(5, 60))
    for idx, ask in enumerate(asks):
        if idx % 4 == 1:
            asks[idx] = replace(ask, num_samples=2)
        elif idx % 4 == 3 and (text := ask.expected().text[3:5]):
            asks[idx] = replace(ask, stop_strings=(text,))
    return asks


def run_all(caller: Caller, asks: Sequence[Ask], workers: RestartingWorkers, kill_every: int) -> list[Transcript]:
    """Runs the requests, at most 24 at once, and kills a worker after each `kill_every` of them."""
    rng = random.Random(14)
    left, running, done = list(asks)[::-1], list[Stream](), list[Transcript]()
    next_kill = kill_every
    while left or running:
        while left and len(running) < OPEN:
            running.append(caller.generate(left.pop().request()))
        ended = [stream for stream in running if stream.ended]
        running = [stream for stream in running if not stream.ended]
        done += [stream.result() for stream in ended]
        if len(done) >= next_kill and (live := workers.live):
            next_kill += kill_every
            rng.choice(live).kill()
        time.sleep(0.002)
    return done


def check_sums(page: MetricsPage, summaries: Sequence[pb.Summary], reasons: Counter[str]) -> None:
    usages, timings = [one.usage for one in summaries], [one.timing for one in summaries]
    sums = {
        "tandem_prompt_tokens_total": sum(one.prompt_tokens for one in usages),
        "tandem_generation_tokens_total": sum(one.output_tokens for one in usages),
        "tandem_discarded_tokens_total": sum(one.discarded_tokens for one in usages),
        "tandem_recomputed_tokens_total": sum(one.recomputed_tokens for one in usages),
        "tandem_worker_changes_survived_total": sum(one.worker_changes for one in timings),
        "tandem_num_preemptions_total": sum(one.preemptions for one in timings),
        "tandem_request_prompt_tokens_sum": sum(one.prompt_tokens for one in usages),
        "tandem_request_generation_tokens_sum": sum(one.output_tokens for one in usages),
        "tandem_e2e_request_latency_seconds_count": len(summaries),
        "tandem_request_queue_time_seconds_count": len(summaries),
    }
    assert {name: page.sum(name) for name in sums} == sums
    assert page.by_label("tandem_request_success_total") == reasons
    assert page.sum("tandem_request_decode_time_seconds_sum") == pytest.approx(
        sum(one.decode_seconds for one in timings)
    )
    num_gaps = page.sum("tandem_inter_token_latency_seconds_count")
    assert num_gaps <= sums["tandem_generation_tokens_total"] - len(summaries)


@pytest.mark.parametrize(
    ("num_requests", "kill_every"),
    [(60, 12), pytest.param(1000, 50, marks=pytest.mark.long)],
)
def test_the_sums_are_those_of_the_summaries_under_kills(rig: Rig, num_requests: int, kill_every: int) -> None:
    asks = asks_of(num_requests)
    with RestartingWorkers(rig, SHAPE, count=2) as workers:
        scheduler = rig.scheduler("--frontends", "2", "--metrics-listen", "127.0.0.1:0")
        callers = [rig.caller(scheduler) for _ in range(2)]
        callers[0].wait_serving()
        done = run_all(callers[0], asks[::2], workers, kill_every // 2)
        done += run_all(callers[1], asks[1::2], workers, kill_every // 2)
        deaths = len(workers.deaths)
        callers[0].wait_idle()
    summaries = [one.summary for one in done]
    reasons = Counter(
        pb.FinishReason.Name(sample.finished.reason).removeprefix("FINISH_REASON_").lower()
        for one in done
        for sample in one.samples.values()
    )
    num_samples = sum(reasons.values())
    lane_resets = callers[0].load().lane_resets
    # The figures of the front ends, and those of a look at the core after the last step.
    page = wait_page(
        page_url(scheduler),
        lambda page: (
            page.sum("tandem_request_success_total") >= num_samples
            and page.sum("tandem_lane_resets_total") == lane_resets
            and page.get("tandem_num_requests_running") == page.get("tandem_num_requests_waiting") == 0
        ),
    )
    check_sums(page, summaries, reasons)
    assert deaths >= 3 and page.sum("tandem_worker_changes_survived_total") > 0
    assert page.sum("tandem_recomputed_tokens_total") > 0 and page.sum("tandem_num_preemptions_total") > 0
    assert page.get("tandem_iteration_tokens_total_count") == page.sum("tandem_step_seconds_count")
    assert set(page.by_label("tandem_kv_cache_usage_perc")) <= {"0", "1", "2"}


def test_a_front_end_that_dies_is_counted_and_its_reports_stay(rig: Rig) -> None:
    scheduler, _, caller = rig.serve(*SHAPE, scheduler_flags=("--metrics-listen", "127.0.0.1:0"))
    url = page_url(scheduler)
    [ask, last] = random_asks(2, seed=3, prompts=(5, 5), outputs=(8, 8))
    caller.generate(ask.request()).result()
    page = wait_page(url, lambda page: page.sum("tandem_request_success_total") == 1)
    assert page.sum("tandem_frontend_deaths_total") == 0 and page.get("tandem_frontends") == 1
    psutil.Process(scheduler.frontend_pid()).kill()
    page = wait_page(url, lambda page: page.get("tandem_frontend_deaths_total") == 1)
    assert page.get("tandem_generation_tokens_total") == 8
    caller = rig.ready_caller(scheduler)
    caller.generate(last.request()).result()
    page = wait_page(url, lambda page: page.sum("tandem_request_success_total") == 2)
    assert page.get("tandem_generation_tokens_total") == 16
    assert page.get("tandem_frontends") == page.get("tandem_frontend_deaths_total") == 1


def test_the_page_on_any_address_needs_a_token_that_no_log_has(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("service", "DNS:tandem.test", "IP:127.0.0.1")
    tenants = Tenants(tmp_path / "tokens.toml")
    acme, reader = tenants.add("acme"), tenants.add("prometheus", "metrics")
    tenants.write()
    context = ssl.create_default_context(cafile=authority.certificate)
    with Rig() as rig:
        rig.worker(*SHAPE)
        files = ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key), "--tokens", str(tenants.path))
        scheduler = rig.scheduler(*files, "--metrics-listen", "0.0.0.0:0", "--log-level", "debug", listen="0.0.0.0:0")
        url = page_url(scheduler).replace("0.0.0.0", "127.0.0.1")
        for token, code in ((acme, 403), ("", 401), (reader + "x", 401)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                fetch(url, token=token, context=context)
            assert refused.value.code == code
            refused.value.close()
        tls = TlsSettings(ca=authority.certificate)
        port = scheduler.address.rpartition(":")[2]
        address = f"127.0.0.1:{port}"
        with Client(address, token=acme, tls=tls) as client, Client(address, token=reader, tls=tls) as other:
            client.wait_ready(TIMEOUT_SECONDS)
            list(client.generate([1, 2, 3], max_new_tokens=4, ignore_eos=True))
            with pytest.raises(errors.PermissionDenied):
                list(other.generate([1, 2, 3]))
        until(lambda: fetch(url, token=reader, context=context).sum("tandem_tenant_generation_tokens_total") >= 4)
        page = fetch(url, token=reader, context=context)
        assert page.by_label("tandem_tenant_prompt_tokens_total") == {"acme": 3}
        assert page.by_label("tandem_admission_rejections_total") == {"permission_denied": 1}
        assert scheduler.terminate() == 0
        lines = "\n".join(child.output() for child in rig.children)
        assert not [token for token in tenants.all if token in lines]
