"""From tokens to the events of an answer: its sections, its stop strings, its tool calls.

The text is read character by character, and what a character does depends on those before it alone; so any
cut of tokens into pushes gives the same answer. Nothing is sent that may yet turn out to be part of a marker
or of a stop string.

What is text, reasoning and tool text:

- Reasoning stands at the start of the answer, behind its start marker, or goes on from the prompt's end where
  the chat template opened it there. It ends with its end marker, or with the answer.
- A section of tool text begins with a marker of the format anywhere in the text, and with a bare call at the
  text's start where the format has that. Only requests with tools have them. How calls are read out of it,
  and what becomes of text that is none: `tool_formats.calls`.
- Line ends next to a section belong to no text: models write them to part sections.
- Stop strings are looked for in text alone, and within one stretch of it; tool text that turns out to be none
  is text, and a stop string in it is met when that turns out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tenfold.checkpoint.text_stream import StopStrings
from tenfold.server.answer_events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallBegin,
    ToolCallEnd,
)
from tenfold.server.reasoning import ReasoningFormat
from tenfold.server.text import Stream
from tenfold.server.tool_formats.base import State, ToolFormat
from tenfold.server.tool_formats.calls import CallReader


@dataclass(frozen=True)
class Sections:
    """What an answer may have beside text."""

    tools: ToolFormat | None = None
    """None: no calls are looked for."""
    tool_names: frozenset[str] = frozenset()
    """A call of anything else is text."""
    one_call: bool = False
    """The answer ends with its first call."""
    reasoning: ReasoningFormat | None = None
    opened: bool = False
    """The prompt ends within reasoning."""


class AnswerStream:
    """The text side of one answer: a `text.Stream` whose text is the answer's own, without reasoning and
    calls, and that keeps all events for `take`."""

    def __init__(self, decoder: Stream, stop: tuple[str, ...], sections: Sections) -> None:
        self._decoder = decoder
        """Without stop strings, and with the format's tokens shown."""
        self._sections = sections
        self._stops = StopStrings(stop) if stop else None
        tools = sections.tools
        self._marks = StopStrings(tools.markers) if tools is not None else None
        reasoning = sections.reasoning
        self._thought_end = StopStrings((reasoning.end,)) if reasoning is not None else None
        self.stopped: str | None = None
        """The stop string that ended the text; empty: it ended with the one call that was wanted."""
        self.tokens_used = 0
        self.reasoning_tokens = 0
        self.calls = 0
        """Calls begun so far."""
        self._events: list[Event] = []
        self._text: list[str] = []
        """Text since the last call of `push`."""
        self._state = 0
        self._mark_state = 0
        self._held = ""
        """Text that is not sent."""
        self._marker = 0
        """How many of the held characters, the last ones, are the marker of the section."""
        self._edge = False
        """At the edge of a section: line ends are no text."""
        self._reader: CallReader | None = None
        if sections.opened and reasoning is not None:
            self._read = self._reasoning
            self._edge = True
        elif reasoning is not None or (tools is not None and tools.bare):
            self._read = self._start
        else:
            self._read = self._content
        self._may_think = reasoning is not None

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes tokens; gives back the text that may be sent. Tokens behind the end are ignored."""
        for token in token_ids:
            if self.stopped is not None:
                break
            self.tokens_used += 1
            thinking = self._read == self._reasoning
            text = self._decoder.push((token,))
            if text:
                self._feed(text)
            if thinking or self._read == self._reasoning:
                self.reasoning_tokens += 1
        return self._taken_text()

    def finish(self) -> str:
        """What was held back, once no token follows."""
        if self.stopped is None:
            self._feed(self._decoder.finish())
        if self.stopped is None:
            self._end()
        return self._taken_text()

    def take(self) -> list[Event]:
        """The events since the last time. Neighbours of one kind are joined."""
        events, self._events = self._events, []
        return events

    def _taken_text(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text

    def _feed(self, text: str) -> None:
        at = 0
        while at < len(text) and self.stopped is None:
            at = self._read(text, at)

    def _end(self) -> None:
        if self._read == self._start:
            lead, self._held = self._held, ""
            self._read = self._content
            self._feed(lead)
        while self._reader is not None and self.stopped is None:
            reader = self._reader
            reader.finish()
            self._leave(reader)  # which may find another section in what was none
        if self.stopped is None and self._held:
            (self._think if self._read == self._reasoning else self._say)(self._held)
            self._held = ""

    # Each of these reads on from text[at] and returns where it stopped.

    def _start(self, text: str, at: int) -> int:
        """Before anything but white space: reasoning or a bare call may begin here."""
        reasoning = self._sections.reasoning if self._may_think else None
        tools = self._sections.tools
        while at < len(text):
            self._held += text[at]
            at += 1
            seen = self._held.lstrip()
            if reasoning is not None and seen == reasoning.start:
                self._held = ""
                self._may_think = False
                self._edge = True
                self._read = self._reasoning
                return at
            if not seen or (reasoning is not None and reasoning.start.startswith(seen)):
                continue
            lead, self._held = self._held, ""
            if tools is not None and tools.bare and seen == "{":
                self._held = lead[:-1].lstrip("\n") if self._edge else lead[:-1]
                self._edge = False
                self._open(marker=0, bare=True)
                return at - 1
            self._read = self._content
            self._feed(lead)
            return at
        return at

    def _reasoning(self, text: str, at: int) -> int:
        if self._edge:
            at = self._skip(text, at)
        automaton = self._thought_end
        assert automaton is not None
        state = self._state
        for i in range(at, len(text)):
            state = automaton.step(state, text[i])
            found = automaton.match[state]
            if found is not None:
                self._think((self._held + text[at : i + 1])[: -len(found)].rstrip("\n"))
                self._held = ""
                self._state = 0
                self._may_think = False
                self._edge = True
                tools = self._sections.tools
                self._read = self._start if tools is not None and tools.bare else self._content
                return i + 1
        self._state = state
        whole = self._held + text[at:]
        hold = automaton.depth[state]
        self._think(self._hold(whole, hold + _line_ends(whole[: len(whole) - hold])))
        return len(text)

    def _content(self, text: str, at: int) -> int:
        if self._edge:
            at = self._skip(text, at)
        return self._plain(text, at, self._marks)

    def _plain(self, text: str, at: int, marks: StopStrings | None) -> int:
        """Text, with stop strings, and markers of calls if they are looked for."""
        stops = self._stops
        state, mark_state = self._state, self._mark_state
        if stops is not None or marks is not None:
            for i in range(at, len(text)):
                char = text[i]
                stop = mark = None
                if stops is not None:
                    state = stops.step(state, char)
                    stop = stops.match[state]
                if marks is not None:
                    mark_state = marks.step(mark_state, char)
                    mark = marks.match[mark_state]
                if stop is not None and (mark is None or len(stop) >= len(mark)):
                    self._say((self._held + text[at : i + 1])[: -len(stop)])
                    self._held = ""
                    self.stopped = stop
                    return len(text)
                if mark is not None:
                    self._held += text[at : i + 1]
                    self._state = state
                    self._open(marker=len(mark), bare=False)
                    return i + 1
        self._state, self._mark_state = state, mark_state
        whole = self._held + text[at:]
        hold = 0 if stops is None else stops.depth[state]
        if self._marks is not None:
            # A section may follow, so line ends wait; so does what stands before a marker.
            hold = max(hold, self._marks.depth[mark_state])
            hold += _line_ends(whole[: len(whole) - hold])
        self._say(self._hold(whole, hold))
        return len(text)

    def _open(self, marker: int, bare: bool) -> None:
        """A section of tool text begins; ``_held`` is what may be text still, the marker included."""
        tools = self._sections.tools
        assert tools is not None
        self._marker = marker
        self._mark_state = 0
        self._reader = CallReader(tools, self._sections.tool_names, self, bare)
        self._read = self._tool_text

    def _tool_text(self, text: str, at: int) -> int:
        reader = self._reader
        assert reader is not None
        at = reader.feed(text, at)
        if reader.state is not State.READING and self.stopped is None:
            self._leave(reader)
        return at

    def _leave(self, reader: CallReader) -> None:
        """The section is over."""
        self._reader = None
        self._read = self._content
        if reader.after_call:
            self._edge = True
            if reader.state is State.FAULT:
                self._feed(reader.text)
        elif reader.state is State.FAULT:
            # Markers in it have been read already; what is held before it may be a stop string's beginning.
            self._plain(reader.text, 0, None)

    # What a reader says.

    def call_begins(self, name: str) -> None:
        """See `tool_formats.base.Sink`."""
        tools = self._sections.tools
        assert tools is not None
        if self._reader is not None and not self._reader.bare:
            self._say(self._held[: len(self._held) - self._marker].rstrip("\n"))
        self._held, self._marker, self._state = "", 0, 0
        self._events.append(ToolCallBegin(self.calls, tools.new_id(), name))
        self.calls += 1

    def call_goes_on(self, arguments: str) -> None:
        """See `tool_formats.base.Sink`."""
        events, index = self._events, self.calls - 1
        if events and isinstance(last := events[-1], ToolArgumentsDelta):
            events[-1] = ToolArgumentsDelta(index, last.text + arguments)
        else:
            events.append(ToolArgumentsDelta(index, arguments))

    def call_ends(self) -> bool:
        """See `tool_formats.base.Sink`."""
        self._events.append(ToolCallEnd(self.calls - 1))
        if self._sections.one_call:
            self.stopped = ""
        return self._sections.one_call

    # What is sent.

    def _skip(self, text: str, at: int) -> int:
        while at < len(text) and text[at] == "\n":
            at += 1
        self._edge = at == len(text)
        return at

    def _hold(self, whole: str, count: int) -> str:
        """Keeps the last ``count`` characters back; returns the others."""
        safe = len(whole) - count
        self._held = whole[safe:]
        return whole[:safe]

    def _say(self, text: str) -> None:
        if not text:
            return
        self._text.append(text)
        if self._events and isinstance(last := self._events[-1], TextDelta):
            self._events[-1] = TextDelta(last.text + text)
        else:
            self._events.append(TextDelta(text))

    def _think(self, text: str) -> None:
        if not text:
            return
        if self._events and isinstance(last := self._events[-1], ReasoningDelta):
            self._events[-1] = ReasoningDelta(last.text + text)
        else:
            self._events.append(ReasoningDelta(text))


def _line_ends(text: str) -> int:
    return len(text) - len(text.rstrip("\n"))
