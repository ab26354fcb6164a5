"""The limits of CPU time that a grammar has in a front end's trial and in a worker alike, and how a refusal tells them.

They are in seconds of the reference machine (`grammar_process.py`), so a machine that is busy or slow refuses nothing
that a quiet one takes.
"""

# Of a mask, and of compiling a grammar with its first mask; a trial, with 64 masks, may take as long.
MASK_SECONDS, COMPILE_SECONDS = 0.25, 2.0
# Wall time for the imports and the largest tokenizers.
START_SECONDS = 60.0


def limit_words(seconds: float, slowness: float) -> str:
    """The limit on a machine that is `slowness` times as slow as the reference."""
    limit, of_reference = shown(seconds * slowness), shown(seconds)
    return f"the limit is {limit} of CPU time ({of_reference} x {slowness:g}, for the speed of this machine)"


def shown(seconds: float) -> str:
    """As people read it."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"
