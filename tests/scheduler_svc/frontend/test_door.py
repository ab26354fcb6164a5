"""Which token may call what: every method of every service, with every kind of token, and what a tenant's limits do."""

import asyncio
import time
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.core.messages.page_hash import prefix_root
from scheduler_svc.frontend import methods, server
from scheduler_svc.frontend.control import ControlServicer
from scheduler_svc.frontend.entrance import Entrance
from scheduler_svc.frontend.grpc_tuning.tuning import ON
from scheduler_svc.frontend.methods import rights_of
from scheduler_svc.frontend.rpc import calls as calls_module
from scheduler_svc.frontend.rpc.calls import CallLimits, Method, Reading
from scheduler_svc.frontend.rpc.status import Refusal
from scheduler_svc.frontend.scan import Scan
from scheduler_svc.frontend.servicer import InferenceServicer
from scheduler_svc.processes.address import ListenError
from tests.rigs.processes import no_threads
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.scheduler_svc.frontend.failures import Code, fails
from tests.scheduler_svc.frontend.fake_core import Service, allow, model_state, note_calls, served, service, until

LINGER = inference_pb2.ResumeParams(linger_seconds=60)
RIGHTS = ("inference", "control", "metrics")
OPEN: dict[str, set[str]] = {
    "Generate": {"inference"},
    "Resume": {"inference"},
    "Tokenize": {"inference"},
    "Detokenize": {"inference"},
    "RenderChat": {"inference"},
    "Abort": {"inference", "control"},
    "GetModelInfo": {"inference", "control"},
    "GetCaller": set(RIGHTS),
    "ListRequests": {"inference", "control"},
    "GetLoad": {"control"},
    "FlushCache": {"control"},
    "ListQuarantine": {"control"},
    "ClearQuarantine": {"control"},
    "Drain": {"control"},
    "UpdateWeights": {"control"},
    "Check": set(RIGHTS),
    "List": set(RIGHTS),
    "Watch": set(RIGHTS),
    "ServerReflectionInfo": set(RIGHTS),
}
"""The rights that open each method. A method that is missing here must be closed."""
METHODS = [
    (f"/{service.full_name}/{method.name}", method.name)
    for file in (inference_pb2, control_pb2, health_pb2, reflection_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
# Their descriptor is that of v1alpha.
METHODS.append(("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "ServerReflectionInfo"))
CHECK = "/grpc.health.v1.Health/Check"
REVOKED = "the token or certificate of this call was revoked"
CLOSED = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)


def token_of(right: str) -> str:
    return f"tandem_{right}"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def listed(token: str, *rights: str, expires: float = 0.0) -> frontend_pb2.Token:
    return frontend_pb2.Token(hash=sha256(token.encode()).digest(), rights=rights, expires=expires)


def tenant(name: str, *tokens: frontend_pb2.Token) -> frontend_pb2.Tenant:
    """A tenant with these tokens, or with one of its own name for inference."""
    return frontend_pb2.Tenant(name=name, tokens=tokens or [listed(name, "inference")])


def only(*tokens: frontend_pb2.Token) -> frontend_pb2.Tenants:
    """One tenant."""
    return frontend_pb2.Tenants(tenants=[tenant("t", *tokens)])


def tenants(*more: frontend_pb2.Tenant) -> frontend_pb2.Tenants:
    tokens = [listed(token_of(right), right) for right in RIGHTS]
    acme = frontend_pb2.Tenant(name="acme", tokens=tokens, min_priority=-5, max_priority=5, max_new_tokens=8)
    return frontend_pb2.Tenants(tenants=[acme, *more])


async def code(s: Service, path: str, metadata: Any = None, *, ends: bool = False) -> tuple[grpc.StatusCode, str]:
    """The status of a call that sends no message. Without `ends` the service may still expect one."""
    call: Any = s.channel.stream_stream(path)(metadata=metadata, timeout=TIMEOUT_SECONDS)
    if ends:
        await call.done_writing()
    return await call.code(), await call.details()


async def lets_in(s: Service, token: str, path: str = CHECK) -> bool:
    return (await code(s, path, bearer(token), ends=True))[0] not in CLOSED


@served(needs_tokens=True, reflection=True)
async def test_every_method_is_closed_unless_a_right_opens_it(s: Service) -> None:
    """The refused calls send no message, so they are refused before one is read."""
    for path, _ in METHODS:
        found = await code(s, path)
        assert found == (Code.UNAVAILABLE, "the service has not read its tokens yet"), path
    await allow(s, tenants())
    for path, name in METHODS:
        for metadata in (None, bearer("tandem_wrong"), bearer(""), bearer(token_of("inference")[:-1])):
            assert (await code(s, path, metadata))[0] == Code.UNAUTHENTICATED, path
        for right in RIGHTS:
            is_open = right in OPEN.get(name, ())
            status, details = await code(s, path, bearer(token_of(right)), ends=is_open)
            assert (status not in CLOSED) == is_open, (path, right, details)
            # Nothing is asked of the core before that.
            assert is_open or (status, details.rpartition("; ")[2]) == (
                Code.PERMISSION_DENIED, f"the caller's token or certificate has {right}"
            )  # fmt: skip
            assert "tandem_" not in details
    assert await s.core.is_silent()


@served(needs_tokens=True, tenants=tenants())
async def test_callers_are_told_who_they_are(s: Service) -> None:
    for right in RIGHTS:
        found = await s.control.GetCaller(control_pb2.GetCallerRequest(), metadata=bearer(token_of(right)))
        assert (found.tenant, list(found.rights)) == ("acme", [right])


@served(needs_tokens=True)
async def test_a_list_has_the_callers_own_tenant_unless_it_has_the_right_of_control(s: Service) -> None:
    entry = control_pb2.RequestEntry(request_id="r", tenant="other")
    refused = "tenant is 'other'; without the right control only requests of 'acme' are listed"
    await allow(s, tenants())

    def lists(right: str, name: str) -> Any:
        return s.control.ListRequests(control_pb2.ListRequestsRequest(tenant=name), metadata=bearer(token_of(right)))

    for right, name, asked, abort_id in (
        ("inference", "", ("acme", False), "r"),
        ("inference", "acme", ("acme", False), "r"),
        ("control", "", ("acme", True), "other/r"),
        ("control", "other", ("other", False), "other/r"),
    ):
        call = lists(right, name)
        query = await s.core.answer("requests_query", "requests_reply", requests=[entry])
        assert (query.tenant, query.all_tenants) == asked
        assert [each.abort_id for each in (await call).requests] == [abort_id]
    await fails(lists("inference", "other"), Code.PERMISSION_DENIED, refused)
    assert await s.core.is_silent()


def test_the_descriptors_have_methods_of_all_services() -> None:
    assert {path.split("/")[1] for path, _ in METHODS} == {
        "tandem.v1.InferenceService",
        "tandem.v1.ControlService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert {name for _, name in METHODS} == OPEN.keys()


def test_a_method_without_an_entry_is_closed_for_all_rights() -> None:
    assert rights_of("/tandem.v1.ControlService/New") == frozenset()
    for needs_tokens in (False, True):
        with pytest.raises(Refusal):
            Entrance(needs_tokens=needs_tokens).enter(rights_of("/tandem.v1.ControlService/New"), None)


@pytest.mark.parametrize("metadata", [(), bearer("tandem_no")])
def test_a_certificate_is_read_once_a_call_and_not_beside_a_token(metadata: Any) -> None:
    entrance, context = Entrance(needs_tokens=True), Mock(spec_set=["invocation_metadata", "auth_context"])
    entrance.table = table = Mock(**{"of_call.return_value": None})
    context.invocation_metadata.return_value = metadata
    context.auth_context.return_value = {"x509_common_name": [b"c"], "x509_subject_alternative_name": [b"a", b"b"]}
    with pytest.raises(Refusal):
        entrance.enter(frozenset({"inference"}), context)
    assert list(table.of_call.call_args.args[1]) == ([] if metadata else ["a", "b", "c"])
    assert context.auth_context.call_count == (0 if metadata else 1)


async def test_tokens_for_which_no_thread_can_be_started_are_loaded_at_once() -> None:
    entrance = Entrance(needs_tokens=True)
    with no_threads():
        entrance.take(frontend_pb2.Tenants())
        await until(lambda: entrance.table is not None)


@served(reflection=True)
async def test_without_tokens_everybody_may_call_everything(s: Service) -> None:
    for path, _ in METHODS:
        assert await lets_in(s, "anything", path)
    _, submit = await s.start_stream(token_ids=inference_pb2.TokenIds(ids=[1, 2]), priority=1000)
    assert submit.tenant == ""


@served(needs_tokens=True, tenants=tenants())
async def test_other_headers_prove_nothing(s: Service) -> None:
    for metadata in (
        # Replayed: the same header twice, and with another one, in both orders.
        (*bearer(token_of("control")), *bearer(token_of("control"))),
        (*bearer("tandem_wrong"), *bearer(token_of("control"))),
        (*bearer(token_of("control")), *bearer("tandem_wrong")),
        (("authorization", f"Basic {token_of('control')}"),),
        (("authorization", token_of("control")),),
        (("authorization", f"Bearer {token_of('control')}{' x' * 2}"),),
        (("authorization", f"Bearer {'x' * 4000}"),),
        (("authorization-bin", f"Bearer {token_of('control')}".encode()),),
        (("proxy-authorization", f"Bearer {token_of('control')}"),),
        (("x-authorization", f"Bearer {token_of('control')}"),),
    ):
        status, details = await code(s, "/tandem.v1.ControlService/GetLoad", metadata)
        assert status == Code.UNAUTHENTICATED and "tandem" not in details, metadata


@served(needs_tokens=True, tenants=tenants())
async def test_the_scheme_is_read_in_any_case(s: Service) -> None:
    for scheme in ("bearer", "BEARER", "Bearer "):
        metadata = (("authorization", f"{scheme} {token_of('inference')}"),)
        assert (await code(s, CHECK, metadata, ends=True))[0] not in CLOSED


@served(needs_tokens=True)
async def test_expired_and_revoked_tokens_get_the_answer_of_unknown_ones(s: Service) -> None:
    now = time.time()
    old = listed("tandem_old", "inference", expires=now - 1)
    soon = listed("tandem_soon", "inference", expires=now + 60)
    await allow(s, tenants(tenant("b", old, soon)))
    unknown = await code(s, CHECK, bearer("tandem_unknown"))
    assert unknown[0] == Code.UNAUTHENTICATED
    assert await code(s, CHECK, bearer("tandem_old")) == unknown
    assert await lets_in(s, "tandem_soon")
    await allow(s, tenants())
    assert await code(s, CHECK, bearer("tandem_soon")) == unknown


@served((server, "SWEEP_SECONDS", 0.02), needs_tokens=True)
async def test_the_streams_of_a_revoked_token_end(s: Service) -> None:
    now = time.time()
    kept, lost, fewer, late = "tandem_kept", "tandem_lost", "tandem_fewer", "tandem_late"
    soon = listed(late, "inference", expires=now + 3600)
    both = listed(fewer, "inference", "metrics")
    await allow(s, only(listed(kept, "inference"), listed(lost, "inference"), both, soon))
    calls: dict[str, tuple[Any, int]] = {}
    for token in (kept, lost, fewer, late):
        call = s.generate(metadata=bearer(token), request_id=token[7:], resume=LINGER)
        submit = await s.core.admit()
        assert (await call.read()).WhichOneof("event") == "accepted"
        calls[token] = call, submit.stream
    expired = listed(late, "inference", expires=now - 1)
    await allow(s, only(listed(kept, "inference"), listed(fewer, "metrics"), expired))
    for token in (lost, fewer):
        await fails(calls[token][0], Code.UNAUTHENTICATED, REVOKED)
    # The core computes no more for them, although they may be resumed.
    cancelled = [await s.core.expect("cancel") for _ in range(2)]
    ended = {calls[token][1] for token in (lost, fewer)}
    assert {(each.stream, each.detach) for each in cancelled} == {(stream, False) for stream in ended}
    for token in (kept, late):
        await s.ends(*calls[token])
    assert await s.core.is_silent()


@served((server, "SWEEP_SECONDS", 0.02), needs_tokens=True)
async def test_detached_requests_and_health_watches_of_a_revoked_token_end(s: Service) -> None:
    kept, lost = listed("kept", "inference"), listed("lost", "inference")
    await allow(s, only(kept, lost))
    for request_id, token in (("a", "kept"), ("b", "lost"), ("c", "lost"), ("d", "lost")):
        call = s.generate(metadata=bearer(token), request_id=request_id, resume=LINGER)
        submit = await s.core.admit()
        await s.core.output(submit.stream, [65])
        assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["accepted", "delta"]
        assert (await s.leave(call)).detach
    # Another token of the tenant takes one of them over.
    resuming = inference_pb2.ResumeRequest(request_id="c", resume_secret=b"s")
    taken = s.inference.Resume(resuming, metadata=bearer("kept"), timeout=TIMEOUT_SECONDS)
    await s.core.expect("resume")
    watches = [s.watch(metadata=bearer(name)) for name in ("kept", "lost")]
    for watch in watches:
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    await allow(s, only(kept))
    abort = await s.core.expect("abort")
    assert (list(abort.request_ids), abort.tenant, abort.all_tenants) == (["b", "d"], "t", False)
    assert (await watches[1].code(), await watches[1].details()) == (Code.UNAUTHENTICATED, REVOKED)
    assert not watches[0].done()
    assert not taken.done()
    assert await s.core.is_silent()


@served(needs_tokens=True, tenants=tenants())
async def test_the_last_tokens_stay_in_force_while_the_core_is_gone(s: Service) -> None:
    s.front_end._on_lost()
    assert (await code(s, CHECK, bearer("tandem_wrong")))[0] == Code.UNAUTHENTICATED
    assert await lets_in(s, token_of("metrics"))


def generate(s: Service, **fields: Any) -> Any:
    return s.generate(metadata=bearer(token_of("inference")), **fields)


@served(needs_tokens=True, tenants=tenants())
async def test_a_request_belongs_to_the_callers_tenant(s: Service) -> None:
    call = generate(s, priority=5, cache=inference_pb2.CacheParams(salt="x"))
    submit = await s.core.admit()
    assert (submit.tenant, submit.priority) == ("acme", 5)
    assert submit.max_new_tokens == 8, "the tenant's limit is below the service's default"
    assert submit.prefix_root == prefix_root(model_state().cache_root, "x", "acme")
    await s.leave(call)
    resuming = inference_pb2.ResumeRequest(request_id="r", resume_secret=b"s")
    call = s.inference.Resume(resuming, metadata=bearer(token_of("inference")), timeout=TIMEOUT_SECONDS)
    assert (await s.core.expect("resume")).tenant == "acme"


@served(needs_tokens=True)
async def test_tenants_with_one_salt_and_prompt_share_no_page_hash(s: Service) -> None:
    """So neither the time nor the count of cached tokens shows a tenant what another has sent."""
    names = ("acme-1", "acme-2")
    await allow(s, tenants(*map(tenant, names)))
    hashes: list[set[bytes]] = []
    for name in (*names, names[0]):
        ids, cache = inference_pb2.TokenIds(ids=range(64)), inference_pb2.CacheParams(salt="s")
        call = s.generate(metadata=bearer(name), token_ids=ids, cache=cache)
        made = (await s.core.admit()).page_hashes
        hashes.append({made[at : at + 32] for at in range(0, len(made), 32)})
        await s.leave(call)
    assert [len(each) for each in hashes] == [4] * 3
    assert hashes[0].isdisjoint(hashes[1])
    assert hashes[0] == hashes[2]


@served(needs_tokens=True, tenants=tenants())
async def test_a_tenants_limits(s: Service) -> None:
    for priority in (6, -6):
        why = f"priority is {priority}; it must be between -5 and 5"
        await fails(generate(s, priority=priority), Code.INVALID_ARGUMENT, why)
    why = "stop.max_new_tokens is 9; the limit is 8, the caller's own"
    await fails(generate(s, stop=inference_pb2.StopParams(max_new_tokens=9)), Code.INVALID_ARGUMENT, why)
    assert await s.core.is_silent()


@served(needs_tokens=True)
async def test_an_abort_is_for_the_callers_tenant_unless_it_has_control(s: Service) -> None:
    await allow(s, tenants(tenant("ops", listed("tandem_both", "inference", "control"))))
    gone, unknown = control_pb2.ABORT_OUTCOME_ABORTED, control_pb2.ABORT_OUTCOME_NOT_FOUND
    for token, name, is_all in (
        (token_of("inference"), "acme", False),
        (token_of("control"), "acme", True),
        ("tandem_both", "ops", True),
    ):
        request = control_pb2.AbortRequest(request_ids=["a", "other/b", "a"])
        reply = s.control.Abort(request, metadata=bearer(token), timeout=TIMEOUT_SECONDS)
        results = [{"request_id": f"{name}/a", "outcome": gone}, {"request_id": f"{name}/other/b", "outcome": unknown}]
        abort = await s.core.answer("abort", "abort_reply", results=results)
        assert (list(abort.request_ids), abort.tenant, abort.all_tenants) == (["a", "other/b"], name, is_all)
        found = [(result.request_id, result.outcome) for result in (await reply).results]
        assert found == [("a", gone), ("other/b", unknown), ("a", gone)]


@served(needs_tokens=True)
async def test_callers_of_different_tenants_are_told_apart_at_the_same_time(s: Service) -> None:
    names = [f"t{i}" for i in range(20)]
    await allow(s, tenants(*map(tenant, names)))
    calls = [s.generate(metadata=bearer(name), request_id=name) for name in names]
    for _ in calls:
        submit = await s.core.admit()
        assert submit.tenant == submit.request_id


async def test_no_token_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with service(tmp_path, needs_tokens=True, tenants=tenants()) as s:
        for token in (token_of("inference"), "tandem_wrong", "tandem_" + "x" * 600):
            for path, _ in METHODS:
                await code(s, path, bearer(token), ends=True)
    assert "tandem_" not in caplog.text.replace("tandem_abc", "")


@served((server, "MAX_WATCHES", 3), needs_tokens=True, health_listen="127.0.0.1:0", tenants=tenants())
async def test_the_health_listener_serves_health_alone_and_bounds_watches(s: Service) -> None:
    host = s.front_end._probes
    async with grpc.aio.insecure_channel(f"127.0.0.1:{host.port}") as channel:
        for path, _ in METHODS:
            if "Health" not in path:
                probe: Any = channel.stream_stream(path)(metadata=bearer(token_of("control")), timeout=TIMEOUT_SECONDS)
                assert await probe.code() == Code.UNIMPLEMENTED
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"", timeout=TIMEOUT_SECONDS) == health_pb2.HealthCheckResponse(status=1).SerializeToString()
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        open_watches: list[Any] = [watch(b"") for _ in range(3)]
        for call in open_watches:
            assert await call.read() == health_pb2.HealthCheckResponse(status=1).SerializeToString()
        refused: Any = watch(b"", timeout=TIMEOUT_SECONDS)
        assert await refused.code() == Code.RESOURCE_EXHAUSTED
        assert "3 health watches are open; the limit is 3" in await refused.details()
        # They take nothing from callers with a token.
        assert await lets_in(s, token_of("metrics"), "/grpc.health.v1.Health/Watch")
        s.front_end.stop()
        for call in open_watches:
            assert await call.read() == health_pb2.HealthCheckResponse(status=2).SerializeToString()


async def test_a_malformed_address_of_the_health_listener_names_its_flag() -> None:
    listener = server.HealthListener("127.0.0.1", share_port=False, tuning=ON)
    with pytest.raises(ListenError, match="must be HOST:PORT") as caught:
        await listener.start()
    assert caught.value.setting == "health_listen"
    await listener.stop(0.0)


async def test_unread_refusals_use_up_nobodys_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unread calls without the right end at the next sweep, others after their time."""
    monkeypatch.setattr(calls_module, "UNREAD_SECONDS", 0.0)
    released: list[set[Any]] = []

    def enter(_: Any) -> str:
        raise Refusal(Code.UNAUTHENTICATED, "no")

    def full() -> int:
        raise Refusal(Code.RESOURCE_EXHAUSTED, "full")

    calls = calls_module.Calls(CallLimits(max_unread=2), is_shared=False)
    monkeypatch.setattr(calls._releaser, "release", lambda tasks: released.append(set(tasks)) or len(tasks))

    async def call(has_right: bool) -> None:
        method = Method(
            request=health_pb2.HealthCheckRequest, enter=(lambda _: "") if has_right else enter, admit=full,
            scan=lambda _: None, answer=None, serialize=bytes,
        )  # pyright: ignore[reportArgumentType]  # fmt: skip
        call = Mock(spec_set=["peer", "set_code", "set_details", "set_trailing_metadata"])
        call.peer.return_value = "ipv4:127.0.0.1:1"
        await calls.handler(method).stream_stream(None, call)
        # The caller does not read the answer.
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(call(number % 4 == 0)) for number in range(8)]
    await asyncio.sleep(0.01)
    calls.sweep()
    assert calls.unread.num_taken == 2
    assert released == [{task for number, task in enumerate(tasks) if number % 4}]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@served(needs_tokens=True, reflection=True)
async def test_no_method_reads_a_message_before_the_token_is_known(s: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole messages that no method could parse, of the size that each admits, with no token and with a wrong one."""
    touched: list[str] = []
    await allow(s, tenants())
    for owner, name in ((Reading, "read"), (calls_module, "check_size"), (calls_module, "parse"), (Scan, "check")):
        note_calls(monkeypatch, owner, name, touched)
    for path, _ in METHODS:
        for metadata in (None, bearer("tandem_wrong")):
            call: Any = s.channel.unary_stream(path)(b"\xff" * 60_000, metadata=metadata, timeout=20)
            assert await call.code() is Code.UNAUTHENTICATED, path
    assert touched == []
    # The watch sees the steps of a call that is let in.
    tokenize = s.channel.unary_unary("/tandem.v1.InferenceService/Tokenize")
    await fails(tokenize(b"\xff" * 60_000, metadata=bearer(token_of("inference"))), Code.INVALID_ARGUMENT)
    assert touched[:3] == ["read", "check_size", "check"]


async def test_the_table_of_methods_has_every_method_of_the_server(s: Service) -> None:
    end, server = s.front_end, Mock(spec_set=["add_generic_rpc_handlers", "add_registered_method_handlers"])
    inference: Any = InferenceServicer(end._readiness, end._streams, end._constraints, max_message_bytes=1)
    control = ControlServicer(end._readiness, end._queries, max_message_bytes=1)
    methods.add_to_server(server, end._calls, end._entrance, inference, control, end._health, end._request_log)
    methods.add_reflection(server, end._calls, end._entrance)
    added = server.add_registered_method_handlers.call_args_list
    found = {f"/{service}/{name}" for service, handlers in (call.args for call in added) for name in handlers}
    generic = [each for call in server.add_generic_rpc_handlers.call_args_list for each in call.args[0]]
    found |= {name for each in generic for name in getattr(each, "_method_handlers", ())}
    assert found == {path for path, _ in METHODS}
