"""What one token's K/V take, of which model. Owns the bytes per element; the models' shapes are the simulator's."""

from dataclasses import dataclass

from scheduler_svc.simulator.cost.hardware import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """`element_bytes` is what one number takes, in the weights and in the K/V."""

    model: Model
    element_bytes: int = 2

    @property
    def name(self) -> str:
        """The model's."""
        return self.model.name

    @property
    def token_bytes(self) -> int:
        """K/V of one token, in all layers."""
        return self.model.kv_values * self.element_bytes
