"""Reading calls out of a section of tool text, character by character, whatever the format.

A call has begun once its name, one of the request's tools, and the first character of its arguments, an
object, are there; from then on its arguments are passed on as they come, and they are all that the model
writes up to the end of the object. Should that turn out to be no JSON, they are what the model wrote up to
the section's end: a client sees what was meant as arguments where arguments are. Tool text in which no call
has begun and which can be none any more is a fault: it goes back to who asked, as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tenfold.server.tool_formats.base import Sink, State, ToolFormat
from tenfold.server.tool_formats.json_scan import JsonScan, Scan

_SPACE = " \t\n\r"
_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_BARE_KEYS = (_NAME, *_ARGUMENTS, "type", "id")
"""A JSON object that nothing marks as a call is one if it has these keys alone."""
_LONGEST_HEADER = 128
_ARGS = "[ARGS]"
_CALL_ID = "[CALL_ID]"


class CallReader:
    """One section: from behind its marker to its end."""

    def __init__(self, form: ToolFormat, names: frozenset[str], sink: Sink, bare: bool = False) -> None:
        self._form = form
        self._names = names
        self._sink = sink
        self.bare = bare
        """The section has no marker."""
        self.state = State.READING
        self.text = ""
        """What was read since the last call ended, or began if none did: no call, if it comes to a fault."""
        self.after_call = False
        """A call was read, and ``text`` stands behind it."""
        self._phase: Callable[[str], bool] = self._item
        """Takes a character; False: it is to be read once more, in the new phase or by who asked."""
        self._in_list = False
        self._begun = False
        """A call has begun and not ended."""
        self._headed = False
        self._tail = ""
        """The beginning of the section's end, or what may be."""
        self._kept: list[str] = []

    def feed(self, text: str, at: int) -> int:
        """Reads on from ``text[at]``; returns where it stopped, which is the end while it is reading."""
        while at < len(text) and self.state is State.READING:
            char = text[at]
            self._kept.append(char)  # before the phase, which forgets what has become part of a call
            if self._phase(char):
                at += 1
            elif self._kept:
                self._kept.pop()
        if self.state is not State.READING:
            self.text = "".join(self._kept)
        return at

    def finish(self) -> None:
        """No more text comes."""
        if self.state is not State.READING:
            return
        if self._begun:
            if self._phase == self._broken and self._tail:
                self._sink.call_goes_on(self._tail)
            self._end_unclosed(self._kept)
        if self.state is State.READING:
            over = self._phase in (self._closing, self._in_list_after)
            self.state = State.CLOSED if over else State.FAULT
        self.text = "".join(self._kept)

    def _fault(self) -> bool:
        self.state = State.FAULT
        return False

    # Between calls.

    def _item(self, char: str) -> bool:
        if char in _SPACE:
            return True
        if char == "[" and not self._in_list and not self.bare:
            self._in_list = True
            return True
        if char == "{":
            self._open_object()
            return True
        if self._form.header and not self._in_list:
            self._head = ""
            self._phase = self._header
            return False
        return self._fault()

    def _in_list_after(self, char: str) -> bool:
        if char in _SPACE:
            return True
        if char == ",":
            self._phase = self._item
            return True
        if char == "]":
            self._close()
            return True
        self._close()
        return False

    def _close(self) -> None:
        """All calls of the section are read; its end may follow."""
        self._phase = self._closing
        self._tail = ""
        if self._form.end is None and not self._form.separator:
            self.state = State.CLOSED

    def _closing(self, char: str) -> bool:
        if char in _SPACE and not self._tail:
            return True
        if char == self._form.separator:
            self._phase = self._item
            return True
        end = self._form.end
        tail = self._tail + char
        if end is None or not end.startswith(tail):
            return self._fault()
        self._tail = tail
        if tail == end:
            self.state = State.CLOSED
        return True

    # Within the object of a call.

    def _open_object(self) -> None:
        self._name: str | None = None
        self._given: str | None = None
        """Arguments that were read before the call could begin."""
        self._first = True
        self._phase = self._key

    def _key(self, char: str) -> bool:
        if char in _SPACE:
            return True
        if char == '"':
            self._scan = JsonScan()
            self._scan.feed(char)
            self._value = char
            self._phase = self._key_text
            return True
        if char == "}" and self._first:
            return self._end_object()
        return self._end_early() if self._begun else self._fault()

    def _key_text(self, char: str) -> bool:
        found = self._scan.feed(char)
        if found is Scan.BAD:
            return self._end_early() if self._begun else self._fault()
        self._value += self._scan.written
        if found is Scan.DONE:
            self._field = _loads(self._value)
            if self.bare and self._field not in _BARE_KEYS:
                return self._fault()
            self._phase = self._colon
        return True

    def _colon(self, char: str) -> bool:
        if char in _SPACE:
            return True
        if char != ":":
            return self._end_early() if self._begun else self._fault()
        self._phase = self._value_start
        return True

    def _value_start(self, char: str) -> bool:
        if char in _SPACE:
            return True
        self._scan = JsonScan()
        self._parts: list[str] = []
        if self._field in _ARGUMENTS and self._name is not None and not self._begun and char == "{":
            self._begin(self._name)
            self._phase = self._arguments
        else:
            self._phase = self._other_value
        return False

    def _other_value(self, char: str) -> bool:
        found = self._scan.feed(char)
        if found is Scan.BAD:
            return self._end_early() if self._begun else self._fault()
        if found is not Scan.OVER:
            self._parts.append(self._scan.written)
        if found is Scan.MORE:
            return True
        self._phase = self._after_value
        taken = self._take("".join(self._parts))
        if not taken:
            self._fault()
        return found is Scan.DONE if taken else False

    def _take(self, value: str) -> bool:
        """A field's value, complete. False: the object is no call."""
        if self._begun:
            return True
        if self._field == _NAME:
            name = _loads(value)
            if not isinstance(name, str) or name not in self._names:
                return False
            self._name = name
        elif self._field in _ARGUMENTS:
            given = _loads(value)
            if isinstance(given, str):
                value, given = given, _loads(given)
            if given is None:
                value, given = "{}", {}
            if not isinstance(given, dict):
                return False
            self._given = value
        if self._name is not None and self._given is not None:
            self._begin(self._name)
            self._sink.call_goes_on(self._given)
        return True

    def _after_value(self, char: str) -> bool:
        if char in _SPACE:
            return True
        if char == ",":
            self._first = False
            self._phase = self._key
            return True
        if char == "}":
            return self._end_object()
        return self._end_early() if self._begun else self._fault()

    def _begin(self, name: str) -> None:
        self._begun = True
        self._kept.clear()
        self._sink.call_begins(name)

    def _arguments(self, char: str) -> bool:
        """Within arguments that are passed on as they come."""
        self._kept.clear()
        found = self._scan.feed(char)
        if found is Scan.BAD:
            self._tail = ""
            self._phase = self._broken
            return False
        self._sink.call_goes_on(self._scan.written)
        if found is Scan.DONE:
            if self._headed:
                self._end_call()
                self._close()
            else:
                self._phase = self._after_value
        return True

    def _broken(self, char: str) -> bool:
        """Within arguments that are no JSON: they go on to the section's end."""
        self._kept.clear()
        tail = self._tail + char
        end = self._form.end
        while tail and (end is None or not end.startswith(tail)):
            self._sink.call_goes_on(tail[0])
            tail = tail[1:]
        self._tail = tail
        if tail and tail == end:
            self._end_call()
            self.state = State.CLOSED
        return True

    def _end_object(self) -> bool:
        if not self._begun:
            if self._name is None:
                return self._fault()
            self._begin(self._name)
            self._sink.call_goes_on("{}")
        self._kept.clear()
        self._end_call()
        if self._in_list:
            self._phase = self._in_list_after
        else:
            self._close()
        return True

    def _end_early(self) -> bool:
        """A call is whole, but not the object around it: most likely a brace is missing."""
        return self._end_unclosed(self._kept[:-1])  # the last character is read once more

    def _end_unclosed(self, left: list[str]) -> bool:
        self._end_call()
        if self.state is State.READING:
            self._close()
            if "".join(left).strip(_SPACE + ","):  # something else than a brace: it must not be lost
                self.state = State.FAULT
        return False

    def _end_call(self) -> None:
        self.after_call = True
        self._begun = False
        if self._sink.call_ends():
            self.state = State.CLOSED

    # A name before its arguments.

    def _header(self, char: str) -> bool:
        if char != "{":
            self._head += char
            return self._fault() if len(self._head) > _LONGEST_HEADER else True
        name = self._head.strip().removesuffix(_ARGS).partition(_CALL_ID)[0].strip()
        if name not in self._names:
            return self._fault()
        self._headed = True
        self._begin(name)
        self._scan = JsonScan()
        self._phase = self._arguments
        return False


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return ()  # nothing that anybody looks for
