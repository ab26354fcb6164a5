"""Two tenants may use one request id, and the limits of the token file come back from the event log."""

import numpy as np
from tandem.internal.v1 import frontend_pb2 as pb

from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.operators import TenantLimits, TenantsChanged
from scheduler_svc.core.messages.page_hash import prefix_root
from scheduler_svc.wire import frontend, tenants

PROMPT = np.array([1, 2], "<i4").tobytes()


def submit(tenant: str, request_id: str = "a") -> ev.Submit:
    message = pb.Submit(stream=1, request_id=request_id, prompt=PROMPT, max_new_tokens=1, num_samples=1, tenant=tenant)
    event = frontend.event_of(pb.FrontendToCore(submit=message), "f")
    assert isinstance(event, ev.Submit)
    return event


def test_the_core_knows_requests_by_tenant_and_id() -> None:
    assert submit("acme").request_id == "acme/a"
    assert submit("acme").tenant == "acme"
    assert submit("").request_id == "a"
    resume = pb.Resume(stream=1, request_id="a", secret_hash=bytes(32), tenant="acme")
    event = frontend.event_of(pb.FrontendToCore(resume=resume), "f")
    assert isinstance(event, ev.Resume)
    assert event.request_id == "acme/a"


def test_an_abort_names_another_tenants_request_only_with_the_right() -> None:
    # With the right, an own id that contains the mark comes second.
    own = {"other/a": ("acme/other/a",)}
    for all_tenants, ids, others in ((False, ("acme/a", "acme/other/a"), {}), (True, ("acme/a", "other/a"), own)):
        abort = pb.Abort(query=1, request_ids=["a", "other/a"], tenant="acme", all_tenants=all_tenants)
        event = frontend.event_of(pb.FrontendToCore(abort=abort), "f")
        assert event == ev.Abort(frontend="f", query=1, request_ids=ids, others=others)


def test_a_saved_submit_gives_the_same_ids_when_it_is_read() -> None:
    for tenant in ("", "acme"):
        event = submit(tenant, "x/y")
        message = frontend.SUBMIT.to_message(event)
        assert (message.request_id, message.tenant) == ("x/y", tenant)
        message.stream = 1
        again = frontend.event_of(pb.FrontendToCore(submit=message), "f")
        assert isinstance(again, ev.Submit)
        assert (again.request_id, again.tenant) == (event.request_id, tenant)


def test_limits_come_back_from_the_event_log() -> None:
    limits = {
        "acme": TenantLimits(requests_per_minute=6, tokens_per_minute=1 << 40, queue_share=0.5),
        "b": TenantLimits(),
    }
    event = TenantsChanged(limits=limits)
    assert tenants.event_of(tenants.entry_of(event)) == event


def test_tenants_and_salts_have_roots_of_their_own() -> None:
    pairs = [("", ""), ("", "a"), ("a", ""), ("a", "b"), ("ab", ""), ("b", "a"), ("", "ab")]
    assert len({prefix_root(b"root", salt, tenant) for tenant, salt in pairs}) == len(pairs)
