"""Following a JSON value character by character: where it ends, and whether it is one at all.

The grammar is RFC 8259's but for one thing that models write often: a control character within a string (a
line end in a piece of code) is taken and escaped.
"""

from __future__ import annotations

import json
from enum import Enum, auto


class Scan(Enum):
    """What a character was to a value."""

    MORE = auto()
    """A part of it; more is to come."""
    DONE = auto()
    """Its last one."""
    OVER = auto()
    """No part of it: the value, a number, was complete before."""
    BAD = auto()
    """No part of any value that begins so."""


_SPACE = " \t\n\r"
_DIGITS = "0123456789"
_NUMBER = {
    "sign": {"0": "zero", "1-9": "whole"},
    "zero": {".": "point", "e": "e"},
    "whole": {"0": "whole", "1-9": "whole", ".": "point", "e": "e"},
    "point": {"0": "part", "1-9": "part"},
    "part": {"0": "part", "1-9": "part", "e": "e"},
    "e": {"+": "power sign", "0": "power", "1-9": "power"},
    "power sign": {"0": "power", "1-9": "power"},
    "power": {"0": "power", "1-9": "power"},
}
_NUMBER_ENDS = ("zero", "whole", "part", "power")
_LITERALS = {"t": "true", "f": "false", "n": "null"}


class JsonScan:
    """One value; leading white space is not a part of it. Takes time O(1) a character."""

    def __init__(self) -> None:
        self._open: list[str] = []
        """The brackets that are open, outermost first."""
        self._is_key = False
        """The string under way is a key."""
        self._state = "value"
        self._rest = ""
        """What a literal still lacks."""
        self._hex = 0
        self.written = ""
        """The last character as it belongs into the JSON text: escaped where it must be."""

    def feed(self, char: str) -> Scan:
        """Takes the next character. Nothing may follow DONE, OVER or BAD."""
        self.written = char
        state = self._state
        if state == "string":
            return self._in_string(char)
        if state == "escape":
            if char == "u":
                self._state, self._hex = "hex", 4
            elif char in '"\\/bfnrt':
                self._state = "string"
            else:
                return Scan.BAD
            return Scan.MORE
        if state == "hex":
            if char not in "0123456789abcdefABCDEF":
                return Scan.BAD
            self._hex -= 1
            if not self._hex:
                self._state = "string"
            return Scan.MORE
        if state == "literal":
            if char != self._rest[0]:
                return Scan.BAD
            self._rest = self._rest[1:]
            return Scan.MORE if self._rest else self._complete()
        if state in _NUMBER:
            return self._in_number(state, char)
        return Scan.MORE if char in _SPACE else self._between(state, char)

    def _in_string(self, char: str) -> Scan:
        if char == '"':
            if self._is_key:
                self._state = "colon"
                return Scan.MORE
            return self._complete()
        if char == "\\":
            self._state = "escape"
        elif char < " ":
            self.written = json.dumps(char)[1:-1]
        return Scan.MORE

    def _in_number(self, state: str, char: str) -> Scan:
        kind = "1-9" if char in _DIGITS[1:] else {"E": "e", "-": "+"}.get(char, char)
        following = _NUMBER[state].get(kind)
        if following is not None:
            self._state = following
            return Scan.MORE
        if state not in _NUMBER_ENDS:
            return Scan.BAD
        if not self._open:
            return Scan.OVER
        self._state = "after"
        return self.feed(char)

    def _between(self, state: str, char: str) -> Scan:
        """At a character that is within no string, number or literal, and no white space."""
        if state == "colon":
            if char != ":":
                return Scan.BAD
            self._state = "value"
            return Scan.MORE
        if state == "after":
            if char == ",":
                self._state = "key" if self._open[-1] == "{" else "value"
                return Scan.MORE
            return self._close(char)
        if state in ("key", "first key"):
            if char == '"':
                self._is_key = True
                self._state = "string"
                return Scan.MORE
            return self._close(char) if state == "first key" else Scan.BAD
        if state == "first value" and char == "]":
            return self._close(char)
        return self._begin(char)

    def _begin(self, char: str) -> Scan:
        self._is_key = False
        if char == "{":
            self._open.append(char)
            self._state = "first key"
        elif char == "[":
            self._open.append(char)
            self._state = "first value"
        elif char == '"':
            self._state = "string"
        elif char in _LITERALS:
            self._state, self._rest = "literal", _LITERALS[char][1:]
        elif char == "-" or char in _DIGITS:
            self._state = "sign" if char == "-" else "zero" if char == "0" else "whole"
        else:
            return Scan.BAD
        return Scan.MORE

    def _close(self, char: str) -> Scan:
        if char != {"{": "}", "[": "]"}[self._open[-1]]:
            return Scan.BAD
        self._open.pop()
        return self._complete()

    def _complete(self) -> Scan:
        if not self._open:
            return Scan.DONE
        self._state = "after"
        return Scan.MORE
