"""A cost curve that is kept true by the steps themselves."""

from __future__ import annotations

from math import exp, log

from tenfold.speculate.cost_curve import CostCurve

# A node follows what is seen with a gain of 1 / (trust + 1), and trust ends here: about 16 steps back.
_MOST_TRUST = 15.0
# What the start-up measurement counts for.
_START_TRUST = 6.0
# After so many steps unseen, a node goes along with two thirds of what moves the others.
_FORGETTING_STEPS = 48.0
_FRESH_STEPS = 8
# A node that was not seen while others moved so far (in log ms) is to be believed no more.
_MISSED_TOO_MUCH = 0.08
_STALE_STEPS = 256
# A residual is cut at so many times the usual size (which is at least this, in log ms) ...
_USUAL_TIMES = 4.0
_LEAST_USUAL = 0.01
# ... but so many cut on end, to the same side, are no outliers.
_SURPRISES = 3
_USUAL_RATE = 0.03


class LiveCurve:
    """Log time at the curve's row counts ("nodes"), corrected by every step.

    What a step took beyond its estimate moves the two nodes around its rows, by a decayed mean. It moves
    nodes that have not been seen for long as well, because what changes mostly changes all (a busy machine,
    deeper contexts); nodes seen lately know better. A residual is cut at four times the usual one, so an
    outlier does little; less so where a node is trusted little, and no more at the third in a row, so a real
    change comes through in a few steps.
    """

    def __init__(self, curve: CostCurve) -> None:
        self._rows = list(curve.rows)
        self._log = [log(ms) for ms in curve.ms]
        self._ms = list(curve.ms)
        self._trust = [_START_TRUST] * len(self._rows)
        self._seen = [0] * len(self._rows)
        self._looked = [False] * len(self._rows)
        self._missed = [0.0] * len(self._rows)
        self._surprises = [0] * len(self._rows)
        self._usual = 0.03
        self._step = 0
        # For each number of rows: the node below and the share of the one above.
        self._below: list[int] = [0]
        self._share: list[float] = [0.0]
        for i in range(len(self._rows) - 1):
            first, last = self._rows[i], self._rows[i + 1]
            self._below += [i] * (last - first)
            self._share += [(r - first) / (last - first) for r in range(first, last)]

    def at(self, rows: int) -> float:
        """Milliseconds of a step of so many rows (1 or more)."""
        ms = self._ms
        if rows < len(self._below):
            i = self._below[rows]
            return ms[i] + (ms[i + 1] - ms[i]) * self._share[rows]
        slope = (ms[-1] - ms[-2]) / (self._rows[-1] - self._rows[-2])
        return ms[-1] + max(slope, 0.0) * (rows - self._rows[-1])

    def _around(self, rows: int) -> tuple[int, float]:
        """The node below, and the share of the one above; beyond the last one, all of the last one."""
        if rows < len(self._below):
            return self._below[rows], self._share[rows]
        return len(self._rows) - 2, 1.0

    def beyond(self, rows: int, most: int) -> list[float]:
        """Milliseconds that 0, 1 ... ``most`` rows more add to a step of ``rows``; does not fall."""
        first = most_yet = self.at(rows)
        added = [0.0]
        for r in range(rows + 1, rows + most + 1):
            most_yet = max(most_yet, self.at(r))
            added.append(most_yet - first)
        return added

    def to_look_at(self, rows: int, most: int) -> int | None:
        """The row count above ``rows`` and up to ``most`` of which a step would tell most: at a node that
        was never seen, or not for long, or surprised when it was, or as near to it as may be. None if all are
        known well."""
        oldest, found = self._step - _STALE_STEPS, None
        below = 1
        for i, r in enumerate(self._rows):
            # Rows that are nearer to the node below tell of that one.
            if r > rows and (r <= most or 2 * most >= r + below):
                seen = self._seen[i]
                if not self._looked[i] or self._surprises[i]:
                    seen -= _STALE_STEPS
                elif self._trust[i] < 3:
                    seen -= _STALE_STEPS // 2
                if seen < oldest:
                    oldest, found = seen, min(r, most)
            below = r
        return found

    def doubtful(self, rows: int) -> bool:
        """Whether what a step of so many rows takes has become a guess: unseen while others moved."""
        i, share = self._around(rows)
        near = i + 1 if share > 0.5 else i
        age = self._step - self._seen[near]
        return age > 2 * _STALE_STEPS or (age > 16 and self._trust[near] < 3)

    def observe(self, rows: int, step_ms: float) -> None:
        """A step of ``rows`` rows took ``step_ms``. Steps far beyond the curve (long prompts) say nothing."""
        nodes = self._rows
        if rows > 2 * nodes[-1] or rows < 1 or not step_ms > 0:
            return
        self._step += 1
        i, share = self._around(rows)
        # A residual is put down to the two nodes around by their share in the estimate and their doubt.
        below, above = (1.0 - share) / self._trust[i], share / self._trust[i + 1]
        near = i + 1 if above > below else i
        residual = log(step_ms / self.at(rows))
        size = abs(residual)
        most = _USUAL_TIMES * self._usual * (1.0 + 6.0 / (self._trust[near] + 1.0))
        # The usual size follows slowly, and no single step may raise it much.
        self._usual += (min(size, _USUAL_TIMES * self._usual) - self._usual) * _USUAL_RATE
        self._usual = max(self._usual, _LEAST_USUAL)
        if size <= most:
            self._surprises[near] = 0
        else:
            before = self._surprises[near]
            sign = 1 if residual > 0.0 else -1
            self._surprises[near] = count = before + sign if before * sign > 0 else sign
            if abs(count) < _SURPRISES:
                residual = most * sign
            elif self._trust[near] > 1.0:
                self._trust[near] = 1.0
                below, above = (1.0 - share) / self._trust[i], share / self._trust[i + 1]
        total = (1.0 - share) * below + share * above + 1.0
        if share < 1.0:
            self._see(i, residual * below / total, 1.0 - share)
        if share > 0.0:
            self._see(i + 1, residual * above / total, share)
        around = (i if share < 1.0 else -1, i + 1 if share > 0.0 else -1)
        self._carry(residual * max(below, above) / total, around)

    def _see(self, node: int, move: float, share: float) -> None:
        """A step said that a node is to move, and had such a share in it."""
        self._log[node] += move
        self._ms[node] = exp(self._log[node])
        self._trust[node] = min(self._trust[node] + share, _MOST_TRUST)
        if share >= 0.5:
            self._seen[node] = self._step
            self._looked[node] = True
            self._missed[node] = 0.0

    def _carry(self, move: float, around: tuple[int, int]) -> None:
        """What a step moved the nodes around it by, others may have moved by unseen."""
        for k in range(len(self._rows)):
            if k in around:
                continue
            self._missed[k] += move
            if self._trust[k] > 1.0 and abs(self._missed[k]) > _MISSED_TOO_MUCH:
                self._trust[k] = 1.0
            age = self._step - self._seen[k]
            if age > _FRESH_STEPS:
                self._log[k] += move * (age / (age + _FORGETTING_STEPS))
                self._ms[k] = exp(self._log[k])
