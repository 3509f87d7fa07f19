"""What a constraint leaves is what it describes: no more, no less, however one gets there."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.constraints import compiler
from tenfold.constraints.base import ConstraintError
from tenfold.constraints.compiler import Compiler
from tenfold.constraints.schema import _MANY, _NAMED, _ONE, _PLAIN
from tenfold.limits import RequestError
from tenfold.protocol import Constraint
from tests.helpers.constraints import (
    SMALL,
    ByteVocabulary,
    SmallVocabulary,
    allowed,
    constraint,
    small_compiler,
)
from tests.helpers.schemas import SCHEMAS

COMPILER = small_compiler()
CHARACTERS = st.sampled_from('ab19 _"/\\.{}[]()*+-')


def encode(text: str) -> list[int]:
    return SMALL.encode(text, add_special_tokens=False, parse_special=False)


def walk(one: Constraint, dice: random.Random, most: int = 60) -> tuple[str, bool]:
    """A text of random allowed tokens, and whether it came to its end."""
    matcher = COMPILER.begin(one)
    tokens: list[int] = []
    while len(tokens) < most:
        token = dice.choice(allowed(matcher))
        if token in matcher.ends:
            return SMALL.decode(tokens), True
        matcher.accept(token)
        tokens.append(token)
    return SMALL.decode(tokens), False


def matches(one: Constraint, text: str) -> bool:
    """Whether the text is let through, whole: cut into its usual tokens and into characters. One of the two
    must be open to who draws: where the text is forced, only its usual tokens are."""
    found, drawn = set(), set()
    for tokens in (encode(text), [token for char in text for token in encode(char)]):
        matcher = COMPILER.begin(one)
        fits, open_ = matcher.fitting(tokens) == len(tokens), True
        if fits:
            for token in tokens:
                open_ = open_ and token in allowed(matcher)
                matcher.accept(token)
        found.add(fits and not matcher.ends.isdisjoint(allowed(matcher)))
        drawn.add(fits and open_)
    assert len(found) == 1, "it depends on how the text is cut"
    assert found == {False} or True in drawn
    return found.pop()


PIECES = st.recursive(
    st.one_of(
        CHARACTERS.map(re.escape), st.sampled_from(["[ab]", "[^a]", r"\d", "[0-9a-b]", "(?:ab|a)", r"[ -/]"])
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,3}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(regex=PIECES, seed=st.integers(0, 99), texts=st.lists(st.text(CHARACTERS, max_size=6), max_size=4))
def test_a_regex_leaves_what_it_matches(regex: str, seed: int, texts: list[str]) -> None:
    """Every text that came of masks matches; and texts are let through if and only if they match."""
    one = constraint("regex", regex)
    text, ended = walk(one, random.Random(seed), 30)
    if ended:
        assert re.fullmatch(regex, text)
        texts = [*texts, text]
    for other in texts:
        assert matches(one, other) == (re.fullmatch(regex, other) is not None)


@settings(max_examples=60, deadline=None)
@given(
    choices=st.lists(st.text(CHARACTERS, min_size=1, max_size=8), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    others=st.lists(st.text(CHARACTERS, max_size=8), max_size=3),
)
def test_a_choice_is_one_of_them(choices: list[str], seed: int, others: list[str]) -> None:
    """Every text is one of the choices, each can be had, and nothing else can."""
    one = constraint("choice", choices)
    text, ended = walk(one, random.Random(seed))
    assert ended and text in choices
    for other in [*choices, *others]:
        assert matches(one, other) == (other in choices)


CHARACTER_CHOICES = ["\x00", "\n\t\x7f", "\u00e9", "\u20ac", "\U0001f600", "</s>", "<end>", '"', "\\n"]


def test_a_choice_may_have_any_character() -> None:
    """Control characters and the names of special tokens too: they are text."""
    tokens = ByteVocabulary()
    matcher = Compiler(lambda: tokens, 257).begin(constraint("choice", CHARACTER_CHOICES))
    for choice in CHARACTER_CHOICES:
        ids = tokens.encode(choice, add_special_tokens=False, parse_special=False)
        assert matcher.fitting(ids) == len(ids)
        for token in ids:
            matcher.accept(token)
        assert 0 in allowed(matcher, 257)
        matcher.rollback(len(ids))
    assert 0 not in allowed(matcher, 257)


@settings(max_examples=60, deadline=None)
@given(index=st.integers(0, 53), seed=st.integers(0, 2**32))
def test_a_mask_depends_on_the_tokens_accepted_and_on_nothing_else(index: int, seed: int) -> None:
    """Guessed, asked, gone ahead and come back: the mask is that of a matcher that went straight on. This
    is what speculation under a constraint rests on."""
    others = [
        constraint("json_object"),
        constraint("regex", "(ab|a)*(12)?[a-e]{2,9}"),
        constraint("choice", ["name", "na", "named", "true"]),
        constraint("grammar", 'start: "in" (A | B)+\nA: /[a-c]+/\nB: "12" | "re"'),
    ]
    one = others[index] if index < 4 else constraint("json_schema", SCHEMAS[index - 4])
    dice = random.Random(seed)
    straight, crooked = COMPILER.begin(one), COMPILER.begin(one)
    for _ in range(25):
        ahead = crooked.forced()[:6] if dice.random() < 0.5 else []
        ahead = ahead[: crooked.fitting([*ahead, dice.randrange(96)])]
        gone = 0
        while gone < len(ahead):
            crooked.accept(ahead[gone])
            gone += 1
        for _ in range(dice.randrange(4)):
            free = [token for token in allowed(crooked) if token not in crooked.ends]
            if not free:
                break
            crooked.accept(dice.choice(free))
            gone += 1
        crooked.rollback(gone)
        tokens = allowed(straight)
        assert allowed(crooked) == tokens
        token = dice.choice(tokens)
        if token in straight.ends:
            return
        straight.accept(token)
        crooked.accept(token)


def test_forced_tokens_are_allowed() -> None:
    """And they are there where there is no choice."""
    matcher = COMPILER.begin(constraint("json_schema", {"const": "name"}))
    assert SMALL.decode(matcher.forced()) == '"name"'
    matcher = COMPILER.begin(constraint("regex", "[ab]+"))
    assert matcher.forced() == []


def test_a_text_that_is_complete_can_only_end() -> None:
    """Where more may come, both."""
    matcher = COMPILER.begin(constraint("regex", "a+"))
    assert 0 not in allowed(matcher)
    matcher.accept(encode("a")[0])
    assert {0, *encode("a")} <= set(allowed(matcher))
    matcher = COMPILER.begin(constraint("choice", ["true"]))
    matcher.accept(encode("true")[0])
    assert allowed(matcher) == [0]


def test_rows_behind_the_vocabulary_are_never_allowed() -> None:
    """A model's output may have more rows than there are tokens."""
    matcher = small_compiler(130).begin(constraint("regex", "(.|\n)*"))
    assert max(allowed(matcher, 130)) < 96


@pytest.mark.parametrize("schema", SCHEMAS[::7])
def test_whitespace_is_bounded(schema: dict[str, Any]) -> None:
    """A model that only likes white space comes to something else."""
    matcher = COMPILER.begin(constraint("json_schema", schema))
    blank = encode(" ")[0]
    for _ in range(40):
        if blank not in allowed(matcher):
            return
        matcher.accept(blank)
    pytest.fail("white space without end")


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "[", "unclosed"),
        ("regex", "", "empty"),
        ("regex", r"a\bb", "not supported"),
        ("regex", "a(?=b)", "look-around"),
        ("regex", "a" * 5000, "4096"),
        ("regex", "(a|b*)" * 600, "fuel|too big|too many"),
        ("choice", [], "from 1 to"),
        ("choice", ["a", ""], "empty choice"),
        ("choice", ["a"] * 2000, "from 1 to"),
        ("choice", "{}", "list of strings"),
        ("json_schema", "{", "not JSON"),
        ("json_schema", {"type": "strin"}, "Invalid type"),
        ("json_schema", {"not": {}}, "not supported"),
        ("json_schema", {"minLength": -1}, "minLength"),
        ("json_schema", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ("json_schema", {"$ref": "#/$defs/a"}, "does not exist"),
        ("json_schema", {"$ref": "https://example.com/a"}, r"not fetched: \$ref must be .* \$defs"),
        ("json_schema", {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "cannot be enforced"),
        ("json_schema", {"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf can be .* or use anyOf"),
        ("json_schema", {"type": "string", "format": "ipv4", "maxLength": 3}, "no string keeps to .*format"),
        ("json_schema", {"multipleOf": 0}, "multipleOf must be a number above 0"),
        ("json_schema", {"enum": []}, "enum must be a list of at least one value"),
        ("json_schema", '{"minimum": 1' + "0" * 5000 + "}", "an integer of more digits than are read"),
        ("json_schema", {"type": "integer", "minimum": 1e40}, "minimum is beyond .*Leave it out"),
        ("json_schema", {"required": "a"}, "the schema cannot be used: Expected array for 'required'"),
        (
            "json_schema",
            {"properties": {"a": True}, "minProperties": 2, "type": "object"},
            "minProperties and maxProperties .* Require them",
        ),
        ("json_schema", {"description": "x" * 70000}, "65536"),
        ("grammar", "start: a", "unknown name"),
        ("grammar", "", "cannot be enforced"),
        ("grammar", "root ::= (", "GBNF"),
        ("grammar", 'start: x\nx[temperature=0.5]: "a"', "temperature"),
        ("grammar", 'start: %json {"x-guidance":{"lenient":true},"not":{}}', "not"),
        ("grammar", "start: @other\n", "unknown grammar"),
        ("grammar", 'start: "\ud800"', "surrogate"),
        ("grammar", "root ::= other", "GBNF.*'other' not found"),
        ("grammar", "other ::= [0-9]", "GBNF.*'root'"),
        ("grammar", "root ::= " + "(" * 30_000, "nested too deeply"),
        ("grammar", "start: start", "nothing but itself"),
        ("grammar", 'start: "a"{1000000}', "limit 20000"),
        ("regex", "(a{1000}){1000}", "too large.*limit"),
        ("regex", "a{100000}", "too large.*limit"),
        ("json_schema", {"$ref": "#"}, "nothing but itself"),
        ("json_schema", {"minLength": 10**30}, "minLength must be an integer from 0 to 4294967295"),
        ("json_schema", {"items": {"maxItems": 2**40}}, "items.maxItems must be an integer"),
        ("json_schema", {"minProperties": "1"}, "minProperties must be an integer"),
        ("json_schema", '{"minimum": 1e400}', "too large for JSON"),
        ("json_schema", " false ", "which no text matches"),
    ],
)
def test_what_cannot_be_enforced_is_refused(kind: Any, text: Any, says: str) -> None:
    """Before any token, naming the field and what is wrong."""
    text = text if isinstance(text, str) else json.dumps(text)
    with pytest.raises(RequestError, match=says) as caught:
        COMPILER.check(Constraint(kind=kind, text=text, field="the_field"))
    assert caught.value.field.startswith("the_field")


REGEX_PIECES = (
    r"a b ( (?: ) [ [^ ] | * + ? {2} {0,3} {1000} {99999999999} { } \d \p{L} \b . ^ $ (?i) \x{41} - && \ \1"
)
GRAMMAR_PIECES = (
    'root ::= start : \n a b "a" " [0-9] /a/ ( ) * + ? {3} {1000} {-1} | %json {} {"type":"object"} %regex '
    "{'substring_words':'a'} %lark %llguidance %ignore %import ~ .. <|x|> <[0]> @x _ A [lazy] [stop=x] # // "
    "& i"
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 10**30),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(["#", "#/$defs/a", "#/properties/a", "(a", "date", "string", "object", "array", "a"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*sorted(_PLAIN | _ONE | _MANY | _NAMED), "a"]), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(
    one=st.one_of(
        st.tuples(
            st.just("regex"), st.lists(st.sampled_from(REGEX_PIECES.split(" ")), max_size=12).map("".join)
        ),
        st.tuples(
            st.just("grammar"),
            st.lists(st.sampled_from(GRAMMAR_PIECES.split(" ")), max_size=12).map(" ".join),
        ),
        st.tuples(st.just("grammar"), st.text(max_size=20).map(lambda text: f"root ::= {text}")),
        st.tuples(st.just("json_schema"), VALUES.map(json.dumps)),
        st.tuples(st.sampled_from(["regex", "grammar", "json_schema", "choice"]), st.text(max_size=20)),
    )
)
def test_whatever_is_asked_for_is_taken_or_refused_by_its_field(one: tuple[Any, str]) -> None:
    """No other exception comes out of the compiler: it would be a 500, and nobody's fault but ours. What is
    taken can be begun."""
    kind, text = one
    try:
        matcher = COMPILER.begin(Constraint(kind=kind, text=text, field="the_field"))
    except RequestError as error:
        assert error.field.startswith("the_field")
        assert not str(error).startswith("the_field cannot be compiled")
        return
    assert allowed(matcher)


def test_a_fault_of_the_library_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic in its Rust is an exception that `except Exception` does not catch."""

    class PanicException(BaseException):
        pass

    def panic(grammar: str, *rest: Any, **more: Any) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr("tenfold.constraints.grammar.grammar_of", panic)
    one = small_compiler()
    with pytest.raises(RequestError, match=r"the_field cannot be compiled.*index out of bounds"):
        one.check(Constraint(kind="regex", text="a", field="the_field"))
    monkeypatch.undo()
    one.check(constraint("regex", "a"))


def test_the_schema_true_is_any_json() -> None:
    """JSON Schema has two schemas that are no objects."""
    one = constraint("json_schema", "true")
    assert matches(one, "true") and matches(one, "[1,2]")
    assert not matches(one, "tru")


def test_gbnf_is_taken_too() -> None:
    """The dialect of llama.cpp, SGLang and vLLM."""
    one = constraint("grammar", 'root ::= "a" [0-9]+ ("x" | "y")*\n')
    assert matches(one, "a12xy")
    assert not matches(one, "ax")


@pytest.mark.parametrize(
    "text",
    [
        "start: r0\n" + "".join(f'r{i}:"a" r{i + 1}\n' for i in range(4000)) + 'r4000: "b"',
        "start: r0\n" + "".join(f'r{i}:"a"? r{(i + 1) % 2500}?\n' for i in range(2500)),
    ],
)
def test_long_chains_do_not_end_the_process(text: str) -> None:
    """They overflow an ordinary stack. Taken or refused, this process lives, and the compiler goes on."""
    one = constraint("grammar", text)
    assert len(text) < 1 << 16
    with suppress(RequestError):
        COMPILER.check(one)
    chain = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1200)}
    with suppress(RequestError):
        COMPILER.check(constraint("json_schema", {"$ref": "#/$defs/d0", "$defs": {**chain, "d1200": {}}}))
    COMPILER.check(constraint("regex", "a"))


def test_a_limit_that_is_exceeded_ends_the_matcher_until_it_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is its own; what came before it can be gone back to."""
    monkeypatch.setitem(compiler.LIMITS, "step_max_items", 100)
    matcher = small_compiler().begin(constraint("grammar", 'start: s\ns: "a" | s s | s "b"'))
    token, before, gone = encode("a")[0], [], 0
    with pytest.raises(ConstraintError, match="cannot be followed"):
        while gone < 50:
            before.append(allowed(matcher))
            matcher.accept(token)
            gone += 1
    assert gone > 1
    with pytest.raises(ConstraintError):
        allowed(matcher)
    matcher.rollback(1)
    assert allowed(matcher) == before[gone - 1]


def test_a_guess_that_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matcher is as if it had not been asked."""
    matcher = COMPILER.begin(constraint("regex", "(name|na)+"))
    matcher.accept(encode("name")[0])
    before = allowed(matcher)

    class Broken:
        """As one of llguidance's behaves whose limits are exceeded by a call."""

        def is_error(self) -> bool:
            return True

        def compute_ff_tokens(self) -> list[int]:
            return [1]

        def validate_tokens(self, tokens: list[int]) -> int:
            return 1

    for ask, answer in ((matcher.forced, []), (lambda: matcher.fitting(encode("na")), 0)):
        matcher._matcher = Broken()
        assert ask() == answer
        assert allowed(matcher) == before


def test_what_was_compiled_is_kept() -> None:
    """So many; the one that was not used for longest is given up. The vocabulary is read with the first."""
    reads: list[int] = []

    def read() -> SmallVocabulary:
        reads.append(1)
        return SMALL

    one = Compiler(read, 96, kept=2)
    assert reads == []
    for text in ("a", "b", "a", "c", "a", "b"):
        one.check(constraint("regex", text))
    assert reads == [1]
    assert one.compiled == 4
    assert one.compile_ms > 0
