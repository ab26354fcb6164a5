"""The window that settings ask for, put on the layers of a model; and what of it cannot work.

Knows nothing of masks, pages or weights.
"""

from gpu_worker.attention.layers import LayerMap
from gpu_worker.settings import WorkerSettings


def with_window(settings: WorkerSettings, layers: LayerMap, max_length: int) -> LayerMap:
    """The layers as settings have them see; layers that slide by themselves stay as they are. Raises ValueError."""
    window, sinks = settings.window, settings.window_sinks
    if window is None:
        return layers
    own = [layer.kind.pattern.window for layer in layers.layers]
    if None not in own:
        widest = max(width for width in own if width is not None)
        raise ValueError(
            f"window is {window}; every layer of this model slides already (the widest window is {widest}), "
            "so that it would change nothing: leave it out"
        )
    check_window(window, sinks, max_length)
    return layers.bounded(window, sinks)


def check_window(window: int, sinks: int, max_length: int) -> None:
    """Raises ValueError where a sequence of `max_length` tokens would never reach the window's end."""
    if window + sinks >= max_length:
        raise ValueError(
            f"window is {window} and window_sinks {sinks}; together they must be less than max_length {max_length}, "
            "or nothing would ever be out of sight"
        )
