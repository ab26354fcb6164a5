"""Reads the plans that a world's core has sent, as lists of tuples that a test can write down."""

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.messages.reports import Load
from tests.scheduler_svc.core.world import FRONTEND, World


def starts(world: World) -> list[tuple[int, list[int]]]:
    """Returns (first position, pages) of every started row, in order."""
    return [(start.first_position, start.pages.tolist()) for plan in world.sent for start in plan.starts]


def first_positions(world: World) -> list[int]:
    """Returns the first position of every started row, in order: the number of its tokens that were cached."""
    return [first for first, _ in starts(world)]


def prompts_started(world: World) -> list[list[int]]:
    """Returns the prompts of the started rows, in order."""
    return [start.tokens[: start.num_prompt_tokens].tolist() for plan in world.sent for start in plan.starts]


def order(world: World) -> list[int]:
    """Returns the streams in the order in which they got a row. Each stream has a prompt of its own."""
    numbers = {tuple(stream.submit.prompt.tolist()): number for number, stream in world.streams.items()}
    return [numbers[tuple(tokens)] for tokens in prompts_started(world)]


def run(world: World) -> list[int]:
    """Runs the world to its end and returns the order of its streams."""
    world.finish()
    return order(world)


def chunks(plan: Plan) -> list[tuple[int, int, int]]:
    """Returns (row, start, count) of each chunk."""
    return _rows(plan.chunk_rows, plan.chunk_starts, plan.chunk_counts)


def swap_outs(plan: Plan) -> list[tuple[int, int]]:
    """Returns (page, host page) of each page swapped out."""
    return _rows(plan.moves.saved_pages, plan.moves.saved_slots)


def copies(plan: Plan) -> list[tuple[int, int, int]]:
    """Returns (from page, to page, tokens) of each copy."""
    return _rows(plan.moves.copied_from, plan.moves.copied_to, plan.moves.copied_tokens)


def swap_ins(plan: Plan) -> list[tuple[int, int]]:
    """Returns (host page, page) of each page swapped in."""
    return _rows(plan.moves.loaded_slots, plan.moves.loaded_pages)


def _rows(*columns: Int32Array) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def load(world: World) -> Load:
    """Returns the core's load."""
    [reply] = world.handle(ev.LoadQuery(frontend=FRONTEND, query=1))
    assert isinstance(reply, fx.LoadReply)
    return reply.load


def flush(world: World) -> int:
    """Empties the prefix cache and returns the number of pages in the reply."""
    [reply] = world.handle(ev.FlushCache(frontend=FRONTEND, query=2))
    assert isinstance(reply, fx.FlushReply)
    return reply.pages
