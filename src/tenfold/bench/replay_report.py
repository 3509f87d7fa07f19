"""What a replay found, for people and for machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tenfold.bench.figures import TotalRatio, table, total_ratio
from tenfold.bench.recording import Tally
from tenfold.bench.replay import Replayed, ReplayResult, Turn

POSITIONS = 4
"""Positions of a draft that the table shows."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Some requests together. Speeds are those of decoding: tokens after the first, a second, one stream."""

    requests: int
    tokens: int
    differ: int
    """Requests whose two answers are not the same; anything but 0 is a fault of Tenfold."""
    plain_tokens_per_s: float | None
    """None here and below: nothing was decoded."""
    speculative_tokens_per_s: float | None
    speedup: TotalRatio | None
    acceptance_length: float | None
    """Tokens committed per step of the target that decoded the request."""
    acceptance: tuple[float, ...]
    """By position in a draft: how often the token there stood when the ones before it had."""
    judged: tuple[int, ...]
    """How often there was one to judge."""
    cached_tokens_plain: int
    cached_tokens_speculative: int
    prompt_tokens: int


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """Some turns together, from the first prompt to the last token."""

    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: TotalRatio
    drafted: dict[str, int]
    """Tokens that each drafter had verified, ..."""
    accepted: dict[str, int]
    """... and how many of them stood."""
    idle: dict[str, int]
    """Why nothing was drafted in a step of a request, and how often."""


class ClassReport(msgspec.Struct, frozen=True, kw_only=True):
    """One class of traffic, or all of it."""

    varied: Summary
    """Of the answers that do not go in circles, ..."""
    repetitive: Summary
    """... of those that do, ..."""
    all: Summary
    """... and of both."""
    whole: Whole
    forecast: float | None
    """The speed-up that was forecast before the run, of answers that do not go in circles."""


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    model: str
    version: str
    threads: int
    isa: str
    streams: int
    left_out: int
    """Requests that were not replayed because the drafter was trained with their conversations."""
    faults: int
    """Calls of the speculator that failed; the log has the first."""
    classes: dict[str, ClassReport]
    overall: ClassReport
    requests: tuple[Replayed, ...]
    turns: tuple[Turn, ...]

    def to_json(self) -> dict[str, Any]:
        """For machines: everything, down to each request."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def text(self) -> str:
        """For people."""
        parts = [
            f"{self.model}, {self.streams} stream{'s' * (self.streams > 1)}, {self.isa}, {self.threads} "
            f"threads; tenfold {self.version}. Decoding, one stream:",
            self._table(lambda report: report.varied),
        ]
        if self.overall.repetitive.requests:
            parts += [
                "Answers that go in circles (fewer than 60 % of their 4-grams are distinct), which any "
                "drafter guesses easily, are not in it:",
                self._table(lambda report: report.repetitive, with_forecast=False),
            ]
        parts += ["Whole requests, prompts and repetitive answers included:", self._wholes()]
        parts.append("\n".join(self._notes()))
        return "\n\n".join(parts)

    @property
    def _reports(self) -> dict[str, ClassReport]:
        return {**self.classes, "overall": self.overall} if len(self.classes) > 1 else self.classes

    def _table(self, part: Callable[[ClassReport], Summary], with_forecast: bool = True) -> str:
        shown = {name: part(report) for name, report in self._reports.items()}
        deepest = min(POSITIONS, max(len(summary.acceptance) for summary in shown.values()))
        rows = []
        for name, summary in shown.items():
            if not summary.requests:
                continue
            forecast = [_number(self._reports[name].forecast, 2)] if with_forecast else []
            rows.append(
                [
                    name,
                    str(summary.requests),
                    _number(summary.plain_tokens_per_s),
                    _number(summary.speculative_tokens_per_s),
                    summary.speedup.text() if summary.speedup else "-",
                    *forecast,
                    _number(summary.acceptance_length, 2),
                    *(
                        f"{summary.acceptance[i]:.2f}" if i < len(summary.acceptance) else "-"
                        for i in range(deepest)
                    ),
                    str(summary.differ),
                ]
            )
        head = ["class", "answers", "plain tok/s", "speculative", "speed-up (95 %)"]
        head += ["forecast"] * with_forecast
        return table([*head, "tok/step", *(f"pos {i + 1}" for i in range(deepest)), "differ"], rows)

    def _wholes(self) -> str:
        rows = []
        for name, report in self._reports.items():
            whole, drafted = report.whole, sum(report.whole.drafted.values())
            shares = ", ".join(
                f"{drafter} {tokens / drafted:.0%} ({whole.accepted[drafter] / tokens:.0%} stood)"
                for drafter, tokens in whole.drafted.items()
                if tokens
            )
            rows.append(
                [
                    name,
                    str(report.all.tokens),
                    f"{whole.plain_tokens_per_s:.1f}",
                    f"{whole.speculative_tokens_per_s:.1f}",
                    whole.speedup.text(),
                    shares or "none",
                ]
            )
        head = ["class", "tokens", "plain tok/s", "speculative", "speed-up (95 %)", "drafted tokens"]
        return table(head, rows)

    def _notes(self) -> list[str]:
        every = self.overall.all
        lines = [
            f"{every.differ} of {every.requests} answers differ."
            if every.differ
            else f"All {every.requests} answers are the same with speculation and without."
        ]
        plain, speculative = every.cached_tokens_plain, every.cached_tokens_speculative
        cached = f"Prompt tokens found in the prefix cache: {plain} of {every.prompt_tokens}"
        lines.append(
            f"{cached}, both ways." if plain == speculative else f"{cached}; with speculation {speculative}."
        )
        if idle := self.overall.whole.idle:
            why = ", ".join(
                f"{why} {count}" for why, count in sorted(idle.items(), key=lambda item: -item[1])
            )
            lines.append(f"Steps of a request without a draft: {why}.")
        if self.faults:
            lines.append(
                f"The speculator failed {self.faults} times, and nothing was drafted then: see above."
            )
        if self.left_out:
            lines.append(
                f"{self.left_out} requests were left out: the drafter was trained with their conversations."
            )
        return lines


def report(
    result: ReplayResult,
    *,
    model: str,
    version: str,
    threads: int,
    isa: str,
    left_out: int = 0,
    faults: int = 0,
    forecast: Mapping[str, float] | None = None,
) -> ReplayReport:
    """``forecast``: the speed-up expected for each class, and for ``overall``."""
    expected = forecast or {}

    def one(name: str, kinds: set[str]) -> ClassReport:
        requests = [request for request in result.requests if request.kind in kinds]
        return ClassReport(
            varied=summarize([request for request in requests if not request.repetitive]),
            repetitive=summarize([request for request in requests if request.repetitive]),
            all=summarize(requests),
            whole=_whole([turn for turn in result.turns if turn.kind in kinds]),
            forecast=expected.get(name),
        )

    kinds = sorted({turn.kind for turn in result.turns})
    return ReplayReport(
        model=model,
        version=version,
        threads=threads,
        isa=isa,
        streams=result.streams,
        left_out=left_out,
        faults=faults,
        classes={kind: one(kind, {kind}) for kind in kinds},
        overall=one("overall", set(kinds)),
        requests=result.requests,
        turns=result.turns,
    )


def summarize(requests: Sequence[Replayed]) -> Summary:
    """These requests together."""
    tally = Tally()
    for request in requests:
        tally.merge(request.tally)
    tokens = sum(request.decode_tokens for request in requests)
    plain = [request.plain.decode_s for request in requests]
    speculative = [request.speculative.decode_s for request in requests]
    decoded = tokens > 0 and sum(plain) > 0 and sum(speculative) > 0
    return Summary(
        requests=len(requests),
        tokens=sum(request.tokens for request in requests),
        differ=sum(not request.same for request in requests),
        plain_tokens_per_s=tokens / sum(plain) if decoded else None,
        speculative_tokens_per_s=tokens / sum(speculative) if decoded else None,
        speedup=total_ratio(plain, speculative, [request.conversation for request in requests])
        if decoded
        else None,
        acceptance_length=tally.committed / tally.steps if tally.steps else None,
        acceptance=tuple(stood / judged for stood, judged in zip(tally.stood, tally.judged, strict=True)),
        judged=tuple(tally.judged),
        cached_tokens_plain=sum(request.plain.cached_tokens for request in requests),
        cached_tokens_speculative=sum(request.speculative.cached_tokens for request in requests),
        prompt_tokens=sum(request.prompt_tokens for request in requests),
    )


def _whole(turns: Sequence[Turn]) -> Whole:
    tokens = sum(turn.tokens for turn in turns)
    plain, speculative = [turn.plain_s for turn in turns], [turn.speculative_s for turn in turns]
    drafted: dict[str, int] = {}
    accepted: dict[str, int] = {}
    idle: dict[str, int] = {}
    for turn in turns:
        for drafter in turn.drafters:
            drafted[drafter.name] = drafted.get(drafter.name, 0) + drafter.drafted_tokens
            accepted[drafter.name] = accepted.get(drafter.name, 0) + drafter.accepted_tokens
        for why, count in turn.idle.items():
            idle[why] = idle.get(why, 0) + count
    return Whole(
        plain_tokens_per_s=tokens / sum(plain),
        speculative_tokens_per_s=tokens / sum(speculative),
        speedup=total_ratio(plain, speculative, [turn.group for turn in turns]),
        drafted=drafted,
        accepted=accepted,
        idle={why: count for why, count in idle.items() if count},
    )


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
