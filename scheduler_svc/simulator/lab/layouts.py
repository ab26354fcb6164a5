"""The layouts by name, in the order in which they are told. Owns nothing else."""

from scheduler_svc.simulator.lab.contiguous import Contiguous
from scheduler_svc.simulator.lab.growing import Growing
from scheduler_svc.simulator.lab.layout import Layout
from scheduler_svc.simulator.lab.paged import Paged
from scheduler_svc.simulator.lab.shared import Shared

LAYOUTS: dict[str, type[Layout]] = {layout.name: layout for layout in (Contiguous, Growing, Paged, Shared)}
