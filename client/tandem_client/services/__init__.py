"""The scheduler service and one worker of a checkout as child processes: restarts, readiness, stop order, output."""
