"""The tables that a page has of the code: `make fix` writes them between their markers, a test compares them."""

from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from gpu_worker.holder import PROGRAM as HOLDER
from gpu_worker.settings import PROGRAM as WORKER
from scheduler_svc.metrics import catalogue
from scheduler_svc.settings import PROGRAM as SCHEDULER
from tandem_client.gateway.settings import PROGRAM as GATEWAY
from tandem_contract.settings import Program

HANDBOOK = Path(__file__).resolve().parents[2] / "scheduler_svc/deploy/README.md"


def metrics() -> str:
    """Every metric of the service's page."""
    lines = ["| metric | type | labels | |", "|---|---|---|---|"]
    for metric in catalogue.METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines)


def settings() -> str:
    """Every setting of each program that takes variables, in the order of --help."""
    return "\n\n".join("\n".join(_settings(program)) for program in (SCHEDULER, WORKER, HOLDER, GATEWAY))


def _settings(program: Program) -> Iterator[str]:
    yield f"`{program.command}`, variables `{program.prefix}…`:\n"
    yield "| setting | default | |"
    yield "|---|---|---|"
    for name, field in program.model.model_fields.items():
        if field.description is not None:
            yield f"| `{name}` | {_default(field)} | {_escaped(field.description)} |"


def _default(field: FieldInfo) -> str:
    """As --help shows it; empty where the description has it."""
    default = field.default
    if field.default_factory is not None or default in (None, "") or "default:" in str(field.description):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int):
        return f"{default:,}"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", r"\<")


TABLES = {"metrics": metrics, "settings": settings}


def with_tables(page: str) -> str:
    """The page with each table as it must be. Raises ValueError where a marker is missing."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the page has no {begin.strip()} … {end.strip()}")
        page = f"{before}{begin}{table()}\n{end}{after}"
    return page


if __name__ == "__main__":
    HANDBOOK.write_text(with_tables(HANDBOOK.read_text()))
