"""The front end: a process of its own between gRPC callers and the core."""
