"""Why a choice ended, in OpenAI's words and in the service's own."""

from tandem.v1 import inference_pb2

STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"
_PREFIX = "FINISH_REASON_"
_STOPS = frozenset({
    inference_pb2.FINISH_REASON_EOS,
    inference_pb2.FINISH_REASON_STOP_TOKEN,
    inference_pb2.FINISH_REASON_STOP_STRING,
    inference_pb2.FINISH_REASON_CONSTRAINT_COMPLETE,
})  # fmt: skip
# Their names say enough.
_PLAIN = frozenset({
    inference_pb2.FINISH_REASON_EOS,
    inference_pb2.FINISH_REASON_LENGTH,
    inference_pb2.FINISH_REASON_CONSTRAINT_COMPLETE,
})  # fmt: skip


def finish_reason(finished: inference_pb2.Finished, *, has_calls: bool = False) -> str:
    """OpenAI's finish_reason. What was cut short by a limit of any kind, or by an operator, is `length`."""
    if finished.reason in _STOPS:
        return TOOL_CALLS if has_calls else STOP
    return LENGTH


def stop_reason(finished: inference_pb2.Finished) -> str | int | None:
    """What matched, as vLLM gives it; else the service's reason where OpenAI has no word for it."""
    matched = finished.WhichOneof("matched")
    if matched == "stop_string":
        return finished.stop_string
    if finished.reason == inference_pb2.FINISH_REASON_STOP_TOKEN:
        return finished.stop_token_id
    if finished.reason in _PLAIN:
        return None
    return inference_pb2.FinishReason.Name(finished.reason).removeprefix(_PREFIX).lower()
