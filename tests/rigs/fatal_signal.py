"""A program that a fatal signal ends, with Python's stacks on stderr."""


def fatal_signal(last: str) -> str:
    """Its text; `last` is the line that follows the stacks, which a child writes."""
    return f"""
import faulthandler, os, signal
def deep(n):
    return deep(n - 1) if n else signal.raise_signal(signal.SIGSEGV)
if not os.fork():
    faulthandler.enable()
    deep(90)
os.wait()
print({last!r}, flush=True)
signal.raise_signal(signal.SIGSEGV)
"""
