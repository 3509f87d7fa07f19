"""Starting a fresh Python interpreter with this one's modules. Imports nothing of Tenfold."""

from __future__ import annotations

import sys


def python_command(code: str) -> list[str]:
    """A fresh interpreter that runs ``code`` with this process's module path, not the one that its own start
    would give it: with `-m` a file called numpy.py in the working directory would be imported."""
    return [sys.executable, "-c", f"import sys\nsys.path[:] = {sys.path!r}\n{code}"]
