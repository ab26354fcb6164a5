"""Applies the settings window and window_sinks to the layers of a model, and refuses useless values.

Knows nothing of masks, pages or weights.
"""

from gpu_worker.attention.layers import LayerMap
from gpu_worker.settings import WorkerSettings


def with_window(settings: WorkerSettings, layers: LayerMap, max_length: int) -> LayerMap:
    """The layers with the window of the settings; layers that have their own stay unchanged. Raises ValueError."""
    window, sinks = settings.window, settings.window_sinks
    if window is None:
        return layers
    own = [layer.kind.pattern.window for layer in layers.layers]
    if None not in own:
        widest = max(width for width in own if width is not None)
        raise ValueError(
            f"window is {window}; every layer of this model has its own window (the widest is {widest}), "
            "so the setting has no effect: leave it out"
        )
    check_window(window, sinks, max_length)
    return layers.bounded(window, sinks)


def check_window(window: int, sinks: int, max_length: int) -> None:
    """Raises ValueError if the window hides nothing in a sequence of `max_length` tokens."""
    if window + sinks >= max_length:
        raise ValueError(
            f"window is {window} and window_sinks {sinks}; together they must be less than max_length {max_length}, "
            "otherwise the window hides nothing"
        )
