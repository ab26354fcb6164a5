"""What `make test-gpu` runs, in parts that each end within the limit. Owns the parts; knows nothing of how they run."""

from dataclasses import dataclass
from pathlib import Path

WORKER_TESTS = Path("tests/gpu_worker")
# A machine is lent for minutes at a time; a part that takes longer counts as failed.
LIMIT_SECONDS = 240
_NUM_CENSUS_PARTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process: `arguments` for the Python that runs it; {device} stands for the device."""

    name: str
    arguments: tuple[str, ...]


# Folders and files of the worker's tests; each file is in exactly one part, which an architecture test watches.
FILES: dict[str, tuple[str, ...]] = {
    "host": ("wire", "memory", "checkpoint", "test_config.py", "test_failures.py", "test_link.py", "test_slots.py"),
    "attention": ("attention/test_block_mask.py", "attention/test_paged.py", "attention/test_views.py"),
    "forward": ("attention/test_forward.py",),
    "examination": ("examination",),
    "sampling": ("sampling",),
    "runner": ("test_bundled_model.py", "test_runner.py", "test_startup.py"),
}


def parts() -> tuple[Part, ...]:
    """Every part, the quick ones first."""
    tests = [
        Part(
            name=name,
            arguments=(
                "-m",
                "pytest",
                "-q",
                "--device",
                "{device}",
                *(str(WORKER_TESTS / file) for file in files),
            ),
        )
        for name, files in FILES.items()
    ]
    census = [
        Part(
            name=f"census-{number}",
            arguments=("-m", "tests.census", "--device", "{device}", "--part", f"{number}/{_NUM_CENSUS_PARTS}"),
        )
        for number in range(1, _NUM_CENSUS_PARTS + 1)
    ]
    return (*tests, *census)
