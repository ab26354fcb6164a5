"""The simulator: the real core, a cost model in place of the worker, virtual time."""
