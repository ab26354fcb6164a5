"""Numbers of bytes as people and settings write them."""

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def readable(num_bytes: int) -> str:
    """For people: 1.5 GiB."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def settable(num_bytes: int, *, at_least: bool = False) -> str:
    """For a setting: 1.5GiB, no more than `num_bytes`; or no less, where it is what is needed."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            tenths = -(-10 * num_bytes // size) if at_least else 10 * num_bytes // size
            return f"{tenths / 10:.1f}{unit}"
    return str(num_bytes)
