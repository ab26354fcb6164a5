"""The core: a pure state machine that decides what every worker does next."""
