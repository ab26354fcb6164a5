"""Numbers of bytes as text, for messages and for settings."""

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def readable(num_bytes: int) -> str:
    """A size for a message: 1.5 GiB."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def settable(num_bytes: int, *, at_least: bool = False) -> str:
    """A size for a setting: 1.5GiB, rounded down, or up if `at_least`."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            tenths = -(-10 * num_bytes // size) if at_least else 10 * num_bytes // size
            return f"{tenths / 10:.1f}{unit}"
    return str(num_bytes)
