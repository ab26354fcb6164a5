"""Every form of an id that a caller may give names the one request, in its tenant only."""

import pytest

from scheduler_svc.core.messages.names import PREFIXES, core_id, forms, meant, own_id
from tandem_client.gateway.openai import answers

ID = "88bb0f3c"


FORMS = [ID, f"cmpl-{ID}", f"chatcmpl-{ID}", f"CMPL-{ID.upper()}", f"ChatCmpl-{ID}", ID.upper()]


@pytest.mark.parametrize("given", FORMS)
def test_every_form_means_the_id(given: str) -> None:
    assert forms(given)[0] == given
    assert ID in forms(given)
    assert meant(given, "acme")[0] == f"acme/{given}"
    assert f"acme/{ID}" in meant(given, "acme")
    assert f"acme/{ID}" in meant(f"acme/{given}", "ops", all_tenants=True)


def test_an_id_that_is_a_prefix_alone_means_itself() -> None:
    assert forms("cmpl-") == ("cmpl-",)
    assert forms("Cmpl-") == ("Cmpl-", "cmpl-")


def test_only_the_right_leads_out_of_the_tenant() -> None:
    """A tenant may be called like a prefix, so a prefix is never taken off a tenant's name."""
    for tenant in ("acme", "cmpl-acme", "chatcmpl-x"):
        for given in ("other/a", "cmpl-other/a", "/a", "cmpl-/other/a", "A/B"):
            assert {each.partition("/")[0] for each in meant(given, tenant)} == {tenant}


def test_an_operator_may_name_an_own_id_that_contains_the_mark() -> None:
    assert meant("a/b", "ops", all_tenants=True) == ("a/b", "ops/a/b")
    assert meant("cmpl-a/b", "", all_tenants=True) == ("cmpl-a/b", "a/b")


def test_the_callers_id_comes_back() -> None:
    for tenant in ("", "acme"):
        for request_id in ("a", "a/b", "acme/a"):
            assert own_id(core_id(tenant, request_id), tenant) == request_id


def test_the_prefixes_are_those_of_http_answers() -> None:
    assert set(PREFIXES) == {answers._COMPLETION_ID, answers._CHAT_ID}
