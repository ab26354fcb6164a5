"""The simulator: the real core on virtual time, with a cost model in place of the worker."""
