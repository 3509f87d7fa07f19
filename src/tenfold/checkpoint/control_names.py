"""Names of control tokens in what people write: kept from becoming those tokens.

A chat template writes control tokens by name, and so could whoever writes a message: ``<|im_end|>`` in it
would end the message. So before a template sees a conversation, a mark is put behind the first character of
every such name; what the template makes of it is cut at the marks, and the pieces are encoded one by one. No
piece has a whole name of the message's. A conversation without such names gets no marks, and its tokens are
what they always were.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from tenfold.checkpoint.tokenizer_spm import TokenSplitter


class ControlNames:
    """The names of a model's control tokens. Immutable; safe to use from several threads."""

    def __init__(self, names: Iterable[str]) -> None:
        # A name of one character cannot be broken; no model has one.
        self._splitter = TokenSplitter({name: 0 for name in names if len(name) > 1})

    def mark(self, value: Any) -> tuple[Any, str]:
        """``value`` (strings, lists and mappings of them) with every name broken by a mark, and the mark.

        The mark cannot be known beforehand, so no text has it by design.
        """
        # Digits between private characters: whatever a template does to letters and spaces leaves them alone.
        mark = f"\U000f0000{secrets.randbits(64)}\U000f0000"
        return self._marked(value, mark), mark

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            pieces = []
            done = 0
            # On from the next character: a name may begin within another.
            while (found := self._splitter.find(value, done)) is not None:
                pieces.append(value[done : found[0] + 1])
                done = found[0] + 1
            return mark.join([*pieces, value[done:]]) if pieces else value
        if isinstance(value, Mapping):
            # Keys too: those of a call's arguments are a client's own.
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item, mark) for item in value]
        return value
