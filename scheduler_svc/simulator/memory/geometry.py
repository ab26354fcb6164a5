"""The bytes of one token's K/V. Owns the bytes per number; the models' shapes are the simulator's."""

from dataclasses import dataclass

from scheduler_svc.simulator.cost.hardware import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A model and the bytes per number in its weights and K/V."""

    model: Model
    element_bytes: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K/V, in all layers."""
        return self.model.kv_values * self.element_bytes
