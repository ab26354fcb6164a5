"""Owns the parsing of one answer: its reasoning, its content and its calls of tools, from text that arrives in pieces.

What is not a valid call is content, so no text of the model is lost. White space at the edges of a part belongs to the
marks and is left out, but stays at the start and the end of the whole answer. Content that matches a constraint is what
that says to the letter: it begins where the prompt ends, or after the reasoning and the white space that its grammar
has there.

Tokens of a sample are parsed one by one, so the number of tokens of reasoning does not depend on how they arrive.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler_svc.frontend.chat.bodies import plain
from scheduler_svc.frontend.chat.calls import CALLS_FIELD, CallStream, call_id, can_show, cut_calls, read_calls
from scheduler_svc.frontend.chat.forms import REASONING_FIELDS
from scheduler_svc.frontend.chat.segments import OUTSIDE, Event, Kind, Segmenter
from scheduler_svc.frontend.text.output import CallPiece, Parsed, SampleOutput

CONTENT_FIELD = "content"
# A region of calls that is longer is content.
MAX_CALL_CHARS = 65_536


class _Part:
    """The visible text of a field that may have several regions."""

    def __init__(self, spec: Any, *, keeps_start: bool) -> None:
        self._strips: bool = spec is None or spec.content_args.get("strip", True)
        self._join: str = "\n" if spec is None or spec.join is None else spec.join
        # No mark is before it, or text of it is visible already.
        self._keeps_start = keeps_start
        self._held = self._between = self._skip = ""
        self._is_empty = True

    def push(self, text: str) -> str:
        """The text that is visible for certain."""
        while self._skip and text:
            is_next = text[0] == self._skip[0]
            self._skip, text = (self._skip[1:], text[1:]) if is_next else ("", text)
        if not self._strips:
            return self._show(text)
        text = self._held + text
        if not self._keeps_start:
            text = text.lstrip()
        body = text.rstrip()
        self._held = text[len(body) :]
        if not body:
            return ""
        self._keeps_start = True
        return self._show(body)

    def end(self) -> None:
        """The region ends: white space before the mark is not visible."""
        self._held = ""
        self._keeps_start = False
        self._between = "" if self._is_empty else self._join

    def begin(self, *, keeps_start: bool, skip: str = "") -> None:
        """White space before this place, and `skip` after it, is not part of the answer."""
        self._held, self._skip = "", skip
        self._keeps_start |= keeps_start

    def rest(self) -> str:
        """The held text, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _show(self, text: str) -> str:
        between, self._between = self._between, ""
        self._is_empty = False
        return between + text


class AnswerParser:
    """Parses one answer. `spec` is Transformers' ResponseTemplate; `prefix` is what the prompt has of the message."""

    def __init__(
        self,
        spec: Any,
        prefix: str,
        *,
        argument_types: Mapping[str, Mapping[str, Any]],
        ignores_calls: bool,
        has_constraint: bool = False,
        after_reasoning: str = "",
        tool_names: frozenset[str] = frozenset(),
        request_id: str,
        sample_idx: int,
    ) -> None:
        self._spec, self._types = spec, argument_types
        self._has_constraint, self._after_reasoning = has_constraint, after_reasoning
        # The names that a call without its end may have; empty for any.
        self._names = tool_names
        self._request_id, self._sample_idx = request_id, sample_idx
        shown = {CONTENT_FIELD, *REASONING_FIELDS}
        hidden = frozenset(spec.fields.keys() - shown)
        self._segmenter = Segmenter(spec, hidden if ignores_calls else frozenset(), hidden)
        self._content = _Part(spec.fields.get(CONTENT_FIELD), keeps_start=True)
        name = next((field for field in REASONING_FIELDS if field in spec.fields), "")
        self._reasoning_field = name
        self._reasoning = _Part(spec.fields.get(name), keeps_start=False)
        # A region of calls: its first mark, and its text.
        self._mark = self._region = ""
        self._is_babble = False
        # Whether any name makes the region a call.
        self._is_named = True
        # Text outside of regions, as long as there was none: it is the answer of a model that writes no marks.
        self._outside: str | None = ""
        self._shows_calls = CALLS_FIELD in spec.fields and can_show(spec.fields[CALLS_FIELD])
        # A call that shows its arguments while they are written.
        self._stream: CallStream | None = None
        self._num_calls = 0
        # Characters of the prompt that the segmenter still holds, because they may begin a mark.
        self._num_of_prompt = 0
        self._read(self._segmenter.feed(prefix))
        self._num_of_prompt = self._segmenter.num_held
        # The prompt's own text is no answer; a region that it opens counts.
        self._outside = self._outside and ""
        self._content.begin(keeps_start=has_constraint)
        self._reasoning.begin(keeps_start=False)

    @property
    def is_reasoning(self) -> bool:
        return self._segmenter.current == self._reasoning_field

    def feed(self, text: str) -> Parsed:
        """What `text` adds to the answer for certain."""
        return self._read(self._segmenter.feed(text))

    def finish(self, *, is_cut: bool = False) -> Parsed:
        """What the end of the answer adds. `is_cut`: the model had not ended its answer."""
        parsed = self._read(self._segmenter.finish(is_cut=is_cut))
        if self._outside:
            parsed.content += self._content.push(self._outside)
        parsed.content += self._content.rest()
        return parsed

    def _read(self, events: Iterable[Event]) -> Parsed:
        parsed = Parsed()
        for event in events:
            event = self._without_prompt(event)
            if event.field != OUTSIDE:
                self._outside = None
            elif self._outside is not None:
                self._outside += event.text
            if event.field == CALLS_FIELD:
                self._read_calls(event, parsed)
            elif event.field == CONTENT_FIELD:
                if event.kind is Kind.TEXT:
                    parsed.content += self._content.push(event.text)
                elif event.kind is Kind.CLOSE and event.text:
                    # Without a mark of its own it ends where another region begins, which may be no call after all.
                    self._content.end()
            elif event.field == self._reasoning_field:
                if event.kind is Kind.OPEN:
                    self._content.end()
                elif event.kind is Kind.TEXT:
                    parsed.reasoning += self._reasoning.push(event.text)
                elif event.kind is Kind.CLOSE:
                    self._reasoning.end()
                    self._content.end()
                    if self._has_constraint:
                        self._content.begin(keeps_start=True, skip=self._after_reasoning)
            elif self._is_babble:
                # A mark around calls, and the calls are content.
                parsed.content += self._content.push(event.text)
        return parsed

    def _without_prompt(self, event: Event) -> Event:
        num_skipped = min(len(event.text), self._num_of_prompt)
        self._num_of_prompt -= num_skipped
        return event._replace(text=event.text[num_skipped:]) if num_skipped and event.kind is Kind.TEXT else event

    def _read_calls(self, event: Event, parsed: Parsed) -> None:
        if event.kind is Kind.OPEN:
            self._mark, self._region, self._is_babble = event.text, "", False
            self._stream = CallStream(self._spec.fields[CALLS_FIELD], event.text) if self._shows_calls else None
            # Where a call has no mark of its own, an object with a name may begin like one.
            self._is_named = not self._names or not event.text.lstrip().startswith("{")
            if not self._is_named and self._stream is not None and self._stream.name:
                self._is_babble = self._stream.name not in self._names
            return
        is_end = event.kind is not Kind.TEXT
        if self._stream is not None and not self._is_babble:
            if not is_end:
                self._show(self._stream, event.text, parsed)
            if self._stream.has_begun:
                if is_end:
                    self._end_shown(self._stream, parsed, is_cut=event.kind is Kind.CUT)
                return
        if not is_end:
            self._region += event.text
        if is_end and not self._is_babble:
            read = cut_calls if event.kind is Kind.CUT else read_calls
            calls = read(self._mark, self._region, self._spec, self._types)
            if event.kind is Kind.CLOSE:
                self._is_babble = not calls
            if self._names and (event.kind is Kind.CUT or not self._is_named):
                self._is_babble |= any(call.name not in self._names for call in calls)
            for call in calls if not self._is_babble else ():
                self._add(parsed, call.name, call.arguments)
        elif len(self._mark) + len(self._region) > MAX_CALL_CHARS:
            self._is_babble = True
        if self._is_babble:
            parsed.content += self._content.push(self._mark + self._region + (event.text if is_end else ""))
            self._mark = self._region = ""
        elif is_end:
            self._content.end()

    def _show(self, stream: CallStream, text: str, parsed: Parsed) -> None:
        shown = stream.feed(text)
        if shown is None:
            return
        if shown.name:
            self._content.end()
            self._add(parsed, shown.name, shown.arguments)
        elif shown.arguments:
            parsed.calls.append(CallPiece(self._num_calls - 1, "", "", shown.arguments))

    def _end_shown(self, stream: CallStream, parsed: Parsed, *, is_cut: bool) -> None:
        self._stream = None
        if is_cut and (held := stream.reader.held):
            parsed.calls.append(CallPiece(self._num_calls - 1, "", "", held))
        elif rest := stream.rest():
            parsed.content += self._content.push(rest)
        self._content.end()

    def _add(self, parsed: Parsed, name: str, arguments: str) -> None:
        idx = self._num_calls
        parsed.calls.append(CallPiece(idx, call_id(self._request_id, self._sample_idx, idx), name, arguments))
        self._num_calls += 1


@dataclass(slots=True, kw_only=True)
class ChatOutput(SampleOutput):
    parser: AnswerParser
    # The special tokens that are left out of what the caller sees; None keeps all.
    hidden: re.Pattern[str] | None = None

    def _groups(self, tokens: list[int]) -> Iterable[Sequence[int]]:
        return zip(tokens)

    def _parse(self, text: str, num_tokens: int, *, is_end: bool = False, is_cut: bool = False) -> Parsed:
        was_reasoning = self.parser.is_reasoning
        parsed = self.parser.feed(text)
        if was_reasoning or self.parser.is_reasoning:
            self.reasoning_tokens += num_tokens
        if is_end:
            parsed.add(self.parser.finish(is_cut=is_cut))
        calls = [call._replace(name=plain(call.name), arguments=plain(call.arguments)) for call in parsed.calls]
        return Parsed(self._visible(parsed.content), self._visible(parsed.reasoning), calls)

    def _visible(self, text: str) -> str:
        return plain(self.hidden.sub("", text) if self.hidden is not None and text else text)
