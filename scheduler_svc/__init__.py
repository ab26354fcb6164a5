"""The scheduler service: front end and core, CPU only, no torch."""
