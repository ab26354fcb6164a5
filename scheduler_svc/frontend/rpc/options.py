"""Owns every option of the gRPC server: sizes, calls, connections, keepalive, compression. Knows nothing of services.

The names are those of grpcio 1.85.1. A test compares them with that library's own, because gRPC ignores unknown names.
"""

import resource

# More than max_streams, so that a caller with one connection gets a refusal with a reason instead of a call that its
# own gRPC library holds back.
MAX_CALLS_PER_CONNECTION = 16_384
MAX_CONNECTIONS = 4096
# Files that this process opens besides its connections.
SPARE_FILES = 128
# A peer that does not answer a ping is gone, and so are its calls.
KEEPALIVE_MS = 60_000
KEEPALIVE_TIMEOUT_MS = 20_000
# Callers may ping every 5 s, also without calls; our own clients do so every 6 s, and Envoy (deploy/envoy.yaml) every
# 10 s. By default gRPC allows one ping in 5 minutes, without calls one in 2 hours, and answers more with GOAWAY. The
# second less is for pings that the network delays.
MIN_PING_INTERVAL_MS = 4_000
# The time for the TLS handshake and the first frame of HTTP/2; gRPC's default is 120 s. Meanwhile a connection counts.
HANDSHAKE_MS = 10_000
MAX_METADATA_BYTES = 16_384
# What a caller may send of a call's message before it is read, or of a next message. When a message is read, gRPC opens
# the window for all of it at once. A message that is larger waits for that once: a round trip.
WINDOW_BYTES = 16_384

Options = tuple[tuple[str, int], ...]


def server_options(*, max_message_bytes: int, share_port: bool, max_connections: int) -> Options:
    """The options of `grpc.aio.server`."""
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        # Both the soft and the hard limit: between the two gRPC refuses at random.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # Answers have their own bounds: deltas and prompt logprobs are split, lists are as long as the model.
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", int(share_port)),
        # gRPC holds calls until the event loop takes them; its default limit is 1,000. Between these two limits gRPC
        # cancels new calls at random, above the hard limit all of them, and gives no reason. A call that was reset is
        # held too, in 14 KB, so these limits are the memory of callers that open calls and reset them. More calls at
        # once than `max_streams` would be refused anyway.
        ("grpc.server.max_pending_requests", 8_192),
        ("grpc.server.max_pending_requests_hard_limit", 9_216),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        # With the probe, gRPC raises the window of every call of a fast connection to several megabytes.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", max_connections),
        # Callers reconnect on their own.
        ("grpc.max_connection_idle_ms", 15 * 60_000),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        # The first name is the documented one; grpcio 1.85.1 looks at the second alone, with a default of 60 s.
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        # None: a compressed message may be a thousand times smaller than the memory that it takes to read it. A bit for
        # each algorithm; the lowest is "identity".
        ("grpc.compression_enabled_algorithms_bitset", 1),
    )


def allow_connections() -> int:
    """Raises this process's limit of open files as far as allowed. Returns the number of connections that then fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MAX_CONNECTIONS + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft - SPARE_FILES))
