"""What requests are called: the core's ids, and the forms in which a caller may name a request.

A request has the id that its caller chose or was given. The gateway's answers put a prefix before it, an operator the
tenant, and an id may lose its case when a person copies it. `meant` knows all forms, for every method that takes an id.
"""

TENANT_END = "/"
"""Between tenant and id in the core's ids. No tenant's name contains it."""
PREFIXES = ("cmpl-", "chatcmpl-")
"""What the ids in HTTP answers begin with (`tandem_client.gateway.openai.answers`)."""


def core_id(tenant: str, request_id: str) -> str:
    """Returns the core's id of a tenant's request: two tenants may use the same id and learn nothing of each other."""
    return f"{tenant}{TENANT_END}{request_id}" if tenant else request_id


def own_id(name: str, tenant: str) -> str:
    """Returns the id of a tenant's request as its caller knows it."""
    return name.removeprefix(core_id(tenant, ""))


def forms(request_id: str) -> tuple[str, ...]:
    """Returns the ids that may be meant by one, the likeliest first: itself, without a prefix, in lower case."""
    low = request_id.lower()
    bare = next((request_id[len(prefix) :] for prefix in PREFIXES if low.startswith(prefix)), "") or request_id
    return tuple(dict.fromkeys((request_id, bare, low, bare.lower())))


def meant(request_id: str, tenant: str, *, all_tenants: bool = False) -> tuple[str, ...]:
    """Returns the core's ids that a caller may mean, the likeliest first; without `all_tenants` only its tenant's own.

    `all_tenants`: the caller may name another tenant's request as `tenant/id`.
    """
    own_ids = [core_id(tenant, form) for form in forms(request_id)]
    other, mark, rest = request_id.partition(TENANT_END)
    others = [core_id(other, form) for form in forms(rest)] if all_tenants and mark else []
    return tuple(dict.fromkeys([*others, *own_ids]))
