"""The parts of `make test-gpu`, each of which ends within the limit. Knows nothing of how they run."""

from dataclasses import dataclass
from pathlib import Path

WORKER_TESTS = Path("tests/gpu_worker")
# A GPU machine is available for minutes at a time; a part that takes longer counts as failed.
LIMIT_SECONDS = 240
_NUM_CENSUS_PARTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process: arguments for its Python; {device} is replaced by the device."""

    name: str
    arguments: tuple[str, ...]


# Folders and files of the worker's tests; an architecture test checks that each file is in exactly one part.
FILES: dict[str, tuple[str, ...]] = {
    "host": (
        *(
            "wire/test_frames.py",
            "wire/test_order_fields.py",
            "memory",
            "checkpoint",
            "fake_cuda",
            "link",
            "layout",
            "native",
            "cpu",
            "process",
            "holder",
            "group",
            "sharding",
            "cluster",
        ),
        *("test_settings.py", "test_failures.py", "test_logs.py", "test_preflight.py"),
    ),
    "forward": ("attention/test_forward.py",),
    "fusion": ("fusion",),
    # These follow forward, because they reuse its kernels from the compiler's cache.
    "attention": (
        *("attention/test_block_mask.py", "attention/test_operator.py", "attention/test_page_contents.py"),
        *("attention/test_paged.py", "attention/test_kernel_options.py", "attention/test_copy_stream.py"),
        "attention/test_views.py",
    ),
    "pages": (
        "wire/test_page_orders.py",
        "step/test_page_labels.py",
        "step/test_prefix_hits.py",
        "step/test_sliding.py",
    ),
    "compatibility": ("compatibility",),
    "sampling": ("sampling", "step/test_output.py"),
    "constraints": ("constraints",),
    "graphs": ("cuda",),
    "takeover": ("shared_pool/test_device_pool.py", "shared_pool/test_take_over.py"),
    "shared_pool": (
        *("shared_pool/test_checksum.py", "shared_pool/test_device_checksum.py", "shared_pool/test_first_pages.py"),
        "cuda_memory",
    ),
    "runner": (
        "test_bundled_model.py",
        "step/test_runner.py",
        "step/test_results.py",
        "test_startup.py",
        "test_windows.py",
    ),
}
# Parts with too many kernels for the limit are split by these families or names, and the rest.
SELECTIONS: dict[str, tuple[str, ...]] = {
    "forward": ("llama or mistral", "gemma2 or gpt_oss"),
    "takeover": ("captured", "third or float64 or first_plan"),
}


def parts() -> tuple[Part, ...]:
    """Every part, in an order in which later ones find kernels of earlier ones in the compiler's cache."""
    tests = [part for name, files in FILES.items() for part in _of_tests(name, files)]
    census = [
        Part(
            name=f"census-{number}",
            arguments=("-m", "tests.census", "--device", "{device}", "--part", f"{number}/{_NUM_CENSUS_PARTS}"),
        )
        for number in range(1, _NUM_CENSUS_PARTS + 1)
    ]
    return (*tests, *census)


def _of_tests(name: str, files: tuple[str, ...]) -> list[Part]:
    arguments = ("-m", "pytest", "-q", "-m", "", "--device", "{device}", *(str(WORKER_TESTS / file) for file in files))
    if name not in SELECTIONS:
        return [Part(name=name, arguments=arguments)]
    families = SELECTIONS[name]
    selections = (*families, f"not ({' or '.join(families)})")
    return [
        Part(name=f"{name}-{number}", arguments=(*arguments, "-k", selection))
        for number, selection in enumerate(selections, start=1)
    ]
