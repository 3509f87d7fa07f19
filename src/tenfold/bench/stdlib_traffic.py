"""Traffic to try things with, made of what every Python installation has: the source of its library.

Three kinds of requests about each function, as a tool for programmers would send them: write its
documentation, explain it, and extract fields from a page of its manual. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tenfold.bench.disk_room import check_disk_room

LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "idle_test",
}
LINES = range(4, 41)
"""Of a function's source."""
FIRST_TIME = 1_767_225_600
"""2026-01-01, when the first conversation begins; one follows each minute."""
MAX_TOKENS = 256
SYSTEM = "You are a helpful assistant of Python programmers. Answer briefly."


class Function(NamedTuple):
    """A documented function of the library."""

    name: str
    """With module and class."""
    signature: str
    documentation: str
    source: str
    """Without its documentation."""


def stdlib_functions(library: Path | None = None) -> list[Function]:
    """The documented functions and methods of 4 to 40 lines, in order of name, each source once.

    ``library``: where to look; None: this Python's own. Raises ValueError where there are none.
    """
    library = Path(sysconfig.get_paths()["stdlib"]) if library is None else library
    found: dict[str, Function] = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if LEFT_OUT.intersection(parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (
            OSError,
            UnicodeDecodeError,
            SyntaxError,
            ValueError,
        ):  # test data, and code of other versions
            continue
        module = ".".join(part for part in parts if part != "__init__") or "builtins"
        for function in _functions(tree, text.splitlines(), module):
            found.setdefault(function.source, function)
    if not found:
        raise ValueError(f"{library} has no Python source to make traffic of")
    return sorted(found.values(), key=lambda function: function.name)


def stdlib_traffic(count: int, seed: int = 0, library: Path | None = None) -> Iterator[dict[str, Any]]:
    """``count`` lines of traffic, or as many as the library gives; the same seed gives the same lines.

    The three requests about a function are one conversation. Half of the conversations are greedy, the others
    are sampled at temperature 0.7. Raises ValueError as `stdlib_functions` does.
    """
    functions = stdlib_functions(library)
    random.Random(seed).shuffle(functions)
    lines = (line for number, function in enumerate(functions) for line in _about(number, function))
    for line, _ in zip(lines, range(count), strict=False):
        yield line


def write_traffic(path: Path, lines: Iterable[dict[str, Any]], force: bool) -> int:
    """Writes the lines to a file, and returns how many they are. Raises ValueError for a file that is there
    already, unless ``force`` replaces it, or for which there is no room; OSError. What fails leaves nothing
    behind, and a file that was there as it was."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is there already, and is no file; give another name")
    if path.exists() and not force:
        raise ValueError(f"{path} is there already; give another name, or replace it with --force")
    encoded = [msgspec.json.encode(line) + b"\n" for line in lines]
    check_disk_room(path, sum(map(len, encoded)))
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(b"".join(encoded))
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    return len(encoded)


def _about(number: int, function: Function) -> Iterator[dict[str, Any]]:
    code = f"```python\n{function.source}\n```\n\n"
    tasks = {
        "document": code + f"Write a docstring for this function, {function.name}, with its arguments.",
        "explain": code + f"Explain step by step what {function.name} does.",
        "extract": f"{_page(function)}\n\nExtract from this manual page a JSON object with the keys name, "
        "module, arguments (a list), purpose and returns. Write the JSON alone.",
    }
    for index, (kind, task) in enumerate(tasks.items()):
        yield {
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}],
            "temperature": 0.7 if number % 2 else 0,
            "max_tokens": MAX_TOKENS,
            "class": kind,
            "conversation": function.name,
            "time": FIRST_TIME + 60 * number + 10 * index,
        }


def _page(function: Function) -> str:
    """A page as ``man`` would show it."""
    summary, _, rest = function.documentation.partition("\n")
    body = rest.strip() or summary
    sections = {"NAME": f"{function.name} - {summary}", "SYNOPSIS": function.signature, "DESCRIPTION": body}
    return "\n\n".join(
        f"{head}\n" + "\n".join(f"    {line}".rstrip() for line in text.splitlines())
        for head, text in sections.items()
    )


def _functions(tree: ast.Module, lines: list[str], module: str) -> Iterator[Function]:
    scopes: list[tuple[str, ast.Module | ast.ClassDef]] = [(module, tree)]
    for prefix, scope in scopes:
        for node in scope.body:
            if isinstance(node, ast.ClassDef):
                scopes.append((f"{prefix}.{node.name}", node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                function = _function(f"{prefix}.{node.name}", node, lines)
                if function is not None:
                    yield function


def _function(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Function | None:
    documentation = ast.get_docstring(node)
    assert node.end_lineno is not None
    if not documentation or len(node.body) < 2 or node.end_lineno - node.lineno + 1 not in LINES:
        return None
    start, stop = node.body[0].lineno, node.body[0].end_lineno
    assert stop is not None
    rest = lines[node.lineno - 1 : start - 1] + lines[stop : node.end_lineno]
    indent = node.col_offset
    source = "\n".join(line[indent:] if line[:indent].isspace() else line for line in rest if line.strip())
    return Function(name, f"{name}({ast.unparse(node.args)})", documentation, source)
