"""The limit of what the process that forks mask servers says: why it cannot serve. Imports nothing."""

MAX_PACKET = 1_000
