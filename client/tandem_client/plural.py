"""Numbers with their noun, for messages and tables."""


def counted(number: int, thing: str) -> str:
    """Text such as "1 worker" or "2,000 workers"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
