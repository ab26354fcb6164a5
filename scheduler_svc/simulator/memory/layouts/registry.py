"""The layouts by name, in the order of the report."""

from scheduler_svc.simulator.memory.layouts.contiguous import Contiguous
from scheduler_svc.simulator.memory.layouts.growing import Growing
from scheduler_svc.simulator.memory.layouts.layout import Layout
from scheduler_svc.simulator.memory.layouts.paged import Paged
from scheduler_svc.simulator.memory.layouts.shared import Shared

LAYOUTS: dict[str, type[Layout]] = {layout.name: layout for layout in (Contiguous, Growing, Paged, Shared)}
