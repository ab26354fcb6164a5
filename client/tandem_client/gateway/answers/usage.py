"""The numbers of tokens of one HTTP request, over all its prompts."""

from tandem.v1 import inference_pb2


class Tally:
    """Counts from the messages of all calls. Until a call's Summary has come, its tokens are those that have come."""

    __slots__ = ("_cached", "_hides_output", "_output", "_prompt", "_reasoning")

    def __init__(self, num_calls: int, *, hides_output: bool) -> None:
        self._prompt = [0] * num_calls
        self._output = [0] * num_calls
        self._cached = 0
        self._reasoning = 0
        self._hides_output = hides_output

    def accepted(self, idx: int, accepted: inference_pb2.Accepted) -> None:
        """Takes the number of a prompt's tokens."""
        self._prompt[idx] = accepted.prompt_tokens

    def tokens(self, idx: int, number: int) -> None:
        """Counts tokens of a delta that has ids."""
        self._output[idx] += number

    def summary(self, idx: int, usage: inference_pb2.Usage) -> None:
        """Takes the numbers of a call that has ended."""
        self._prompt[idx], self._output[idx] = usage.prompt_tokens, usage.output_tokens
        self._cached += usage.cached_prompt_tokens
        self._reasoning += usage.reasoning_tokens

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts; each counts once, however many samples it has."""
        return sum(self._prompt)

    @property
    def output_tokens(self) -> int:
        """Of all choices."""
        return 0 if self._hides_output else sum(self._output)

    def as_json(self) -> dict[str, object]:
        """OpenAI's `usage`."""
        prompt, output = self.prompt_tokens, self.output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning},
        }
