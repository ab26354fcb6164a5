"""Why a worker cannot use the pages of a dead worker. Each message is one sentence for people."""


class PoolError(Exception):
    """The pages are not there or not to be trusted; the scheduler has them computed again."""


class HolderError(PoolError):
    """The holder is gone, or refuses. If `is_busy`, the pool's last user still lives."""

    def __init__(self, message: str, *, is_busy: bool = False) -> None:
        super().__init__(message)
        self.is_busy = is_busy


class PoolDiffers(PoolError):
    """The memory is not a pool of this worker's kind, or newer than expected."""


class PageDamaged(PoolError):
    """A page of a pool that was taken over does not have the content that its last owner wrote."""
