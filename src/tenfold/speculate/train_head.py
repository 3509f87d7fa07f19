"""Training a recurrent head on a target's answers.

The head is unrolled as it will draft: from an anchor's features, each step with the state of the one before
it. As a later draft only counts where the earlier ones stand, later steps are trained on the anchors where
they did (with what the target drew as newest token, which is then also what the head drafted) and on a share
of the others. What is kept is the epoch whose drafts would have gained most on the validation answers.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tenfold.backends.torch.differentiable import execute
from tenfold.backends.torch.functions import Tensor
from tenfold.graph.ops import AnyOp, Gate
from tenfold.models.recurrent_head import OUTPUT, OUTPUT_NORM, HeadConfig, recurrent_head
from tenfold.speculate.draft_vocab import choose_tokens, coverage
from tenfold.speculate.features import FeatureSet, distinct_share
from tenfold.speculate.head_data import HeadData, Indices, capped, log_normalisers
from tenfold.speculate.head_loss import EARLY, LATE, PositionLoss, position_loss
from tenfold.speculate.head_replay import HeadReplay
from tenfold.speculate.head_weights import Standard, initial_weights, rounded, standard_of
from tenfold.speculate.target import TargetModel, check_fingerprint
from tenfold.speculate.trained_head import (
    CostCurve,
    EpochResult,
    HeadEvidence,
    HeadFormat,
    HeadSettings,
    Progress,
    StartingHead,
    TrainedHead,
)

_STATE = "training.pt"


def train_head(
    train: FeatureSet,
    validation: FeatureSet,
    target: TargetModel,
    settings: HeadSettings,
    costs: CostCurve,
    always: Iterable[int],
    work: str | os.PathLike[str],
    on_progress: Callable[[Progress], object] = lambda progress: None,
    start: StartingHead | None = None,
) -> TrainedHead:
    """Trains a head and returns its best epoch.

    ``always`` are tokens that can be drafted whatever the answers use (the end of a sequence). After every
    epoch all that is needed to go on is in the folder ``work``; a call with the same arguments takes up from
    there. A KeyboardInterrupt ends the training, and the best epoch so far is returned; before the first
    epoch is done it is raised. With ``start`` the training goes on from that head, of the same target,
    instead of from random weights.

    Raises ValueError for features of another target, for answers that are too few, and for a ``work`` of
    another training.
    """
    torch.set_num_threads(settings.threads)
    return _Training(train, validation, target, settings, costs, always, Path(work), on_progress, start).run()


class _Training:
    """One call of `train_head`. What a later sitting needs is in `_save` and `_resume`."""

    def __init__(
        self,
        train: FeatureSet,
        validation: FeatureSet,
        target: TargetModel,
        settings: HeadSettings,
        costs: CostCurve,
        always: Iterable[int],
        work: Path,
        on_progress: Callable[[Progress], object],
        start: StartingHead | None,
    ) -> None:
        self.settings = settings
        self.costs = costs
        self.report = on_progress
        self.work = work
        self.source = train.source
        kept = [i for i, a in enumerate(train.answers) if distinct_share(a.tokens) >= settings.least_distinct]
        self.left_out = len(train.answers) - len(kept)
        self.train = train.select(kept)
        _check_sources(train, validation, target)
        self.start = start
        self.token_ids = choose_tokens(
            (a.tokens for a in self.train.answers),
            settings.vocab_size,
            always,
            () if start is None else start.token_ids,
        )
        hidden = target.graph.hidden_size
        self.data = HeadData(self.train, self.token_ids, hidden)
        if len(self.data.anchors) < settings.batch:
            raise ValueError(
                f"the answers have {len(self.data.anchors)} tokens to train on, fewer than the "
                f"{settings.batch} of a batch (those that go in circles are left out); give more requests or "
                "longer answers"
            )
        self.replay = HeadReplay(validation, self.token_ids, hidden, settings.unroll, costs)
        self.coverage = coverage((a.tokens for a in validation.answers), self.token_ids)
        self.validation_tokens = validation.token_count
        self.target = target
        table = target.rows(target.embedding, range(target.graph.vocab_size))
        self.table = torch.from_numpy(table).to(torch.bfloat16)
        self.config = HeadConfig(
            feature_width=train.source.width,
            state_width=hidden,
            mlp_width=math.ceil(settings.mlp_ratio * hidden / 32) * 32
            if start is None
            else start.config.mlp_width,
            vocab_size=len(self.token_ids),
            embedding=target.embedding,
            target_vocab_size=target.graph.vocab_size,
            embedding_scale=1 / max(float(np.sqrt(np.square(table).mean())), 1e-6),
            softcap=target.softcap,
        )
        self.graph = recurrent_head(self.config)
        self.normed = OUTPUT_NORM.removesuffix(".weight")
        self.standard: Standard = standard_of(self.data)
        rows = target.rows(target.output, self.token_ids)
        self.rows = torch.from_numpy(rows)
        self.rows_bf16 = self.rows.to(torch.bfloat16)
        generator = torch.Generator().manual_seed(settings.seed)
        self.weights = (
            initial_weights(self.graph, self.config, self.data, generator)
            if start is None
            else self.standard.unfold(
                {name: torch.from_numpy(w) for name, w in start.weights.items() if name != OUTPUT}
            )
        )
        self.trained = {name: w.requires_grad_() for name, w in self.weights.items()}
        self.optimizer = torch.optim.AdamW(
            self.trained.values(),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.total = settings.epochs * (len(self.data.anchors) // settings.batch)
        self.updates = 0
        self.before = 0.0
        """Seconds of earlier sittings."""
        self.results: list[EpochResult] = []
        self.best: dict[str, Tensor] = {}
        self.signature = self._signature(validation)

    def run(self) -> TrainedHead:
        self.began = time.monotonic()
        if not self._resume():
            self.normalisers = log_normalisers(
                self.train,
                self.target,
                self.settings.temperature,
                lambda share: self._tell("normalisers", share),
            )
        ended: Literal["epochs", "time", "no better", "interrupted"] = "epochs"
        try:
            while len(self.results) < self.settings.epochs:
                if self.results and self._seconds() >= self.settings.minutes * 60:
                    ended = "time"
                    break
                if len(self.results) - self._best_epoch() >= self.settings.patience:
                    ended = "no better"
                    break
                self._epoch()
        except KeyboardInterrupt:
            if not self.results:
                raise
            ended = "interrupted"
        return self._result(ended)

    def _epoch(self) -> None:
        """One pass over the anchors (or what time leaves of it), and its replay."""
        number = len(self.results) + 1
        generator = torch.Generator().manual_seed(self.settings.seed * 1000 + number)
        order = torch.randperm(len(self.data.anchors), generator=generator).numpy()
        losses = []
        for first in range(0, len(order) - self.settings.batch + 1, self.settings.batch):
            losses.append(self._update(order[first : first + self.settings.batch], generator))
            if len(losses) % 10 == 0:
                self._tell("training", self._progress(), loss=float(np.mean(losses)))
            if self._progress() >= 1:
                break
        replay = self.replay.run(self.graph, {**self._served(), self.config.embedding: self.table})
        speeds = [result.speed for result in self.results]
        result = EpochResult(
            epoch=number,
            loss=float(np.mean(losses)),
            acceptance=replay.acceptance,
            speed=max(replay.speed),
        )
        self.results.append(result)
        best = result.speed > max(speeds, default=0.0)
        if best:
            self.best = {name: w.clone() for name, w in self._served().items()}
        self._save()
        self._tell("validated", 1.0, loss=result.loss, replay=replay, best=best)

    def _update(self, chosen: Indices, generator: torch.Generator) -> float:
        """One step of the optimizer, over these anchors (places in ``data.anchors``). Returns the loss."""
        settings = self.settings
        progress = self._progress()
        rate = min(1.0, progress / settings.warm_up) if settings.warm_up else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * max(rate, 0.01) * 0.5 * (1 + math.cos(math.pi * progress))
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self._loss(chosen, generator, late=progress >= 0.5)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), settings.clip)
        self.optimizer.step()
        self.updates += 1
        return float(loss.detach())

    def _loss(self, chosen: Indices, generator: torch.Generator, *, late: bool) -> Tensor:
        settings, data = self.settings, self.data
        weights = {**self.weights, OUTPUT: self.rows_bf16, self.config.embedding: self.table}
        rows, left = data.anchors[chosen], data.left[chosen]
        features = self.standard.apply(data.features(rows))
        features += settings.feature_noise * torch.randn(features.shape, generator=generator)

        def dropped(op: AnyOp, value: Tensor) -> Tensor:
            if not isinstance(op, Gate) or not settings.dropout:
                return value
            mask = torch.rand(value.shape, generator=generator) >= settings.dropout
            return value * mask / (1 - settings.dropout)

        total: Any = 0.0
        values = execute(self.graph.first, weights, data.tokens[rows], {"features": features}, after=dropped)
        graph, state = self.graph.first, self.graph.state_output[0]
        for step in range(1, settings.unroll + 1):
            found = self._drafted(rows + step, values[graph.ops[-1].output], values[self.normed], late=late)
            total = total + settings.position_decay ** (step - 1) * found.loss.sum()
            goes_on = self._goes_on(found.accepted, generator) & (left > step)
            if step == settings.unroll or not goes_on.any():
                break
            kept = torch.from_numpy(np.flatnonzero(goes_on))
            rows, left = rows[goes_on], left[goes_on]
            inputs = {"state": values[state][kept]}
            graph, state = self.graph.next, self.graph.state_output[1]
            values = execute(graph, weights, data.tokens[rows + step], inputs, after=dropped)
        return total / len(chosen)

    def _drafted(self, drawn: Indices, logits: Tensor, normed: Tensor, *, late: bool) -> PositionLoss:
        """What drafts cost that were to be the tokens at these rows."""
        data = self.data
        teacher_state = data.final_states(drawn)
        return position_loss(
            logits,
            normed,
            self._teacher(teacher_state, drawn),
            teacher_state,
            data.slots[drawn],
            data.sampled[drawn],
            LATE if late else EARLY,
            self.settings.temperature,
        )

    def _goes_on(self, accepted: Tensor, generator: torch.Generator) -> npt.NDArray[np.bool_]:
        """Which anchors a further draft is trained on: those whose drafts stood, as likely as they do, and
        some of the others."""
        luck = torch.rand(len(accepted), generator=generator)
        others = torch.rand(len(accepted), generator=generator) < self.settings.other_share
        found: npt.NDArray[np.bool_] = ((luck < accepted) | others).numpy()
        return found

    def _teacher(self, states: Tensor, rows: Indices) -> Tensor:
        """The target's log-probabilities of the drafter's tokens where it was in these final states."""
        with torch.no_grad():
            logits = torch.nn.functional.linear(states.to(torch.bfloat16), self.rows_bf16).float()
            logits = capped(logits, self.target.softcap).div_(self.settings.temperature)
            return logits.sub_(self.normalisers[rows][:, None])

    def _served(self) -> dict[str, Tensor]:
        """The weights so far, for features as they are."""
        return {**self.standard.fold(self.weights), OUTPUT: self.rows}

    def _seconds(self) -> float:
        return self.before + time.monotonic() - self.began

    def _progress(self) -> float:
        """Of the whole training, by updates or by time, whichever is further: 0 to 1."""
        return min(1.0, max(self.updates / self.total, self._seconds() / (self.settings.minutes * 60)))

    def _best_epoch(self) -> int:
        """The number of the best epoch so far; 0: there is none yet."""
        return max(self.results, key=lambda result: result.speed).epoch if self.results else 0

    def _tell(
        self, phase: Literal["normalisers", "training", "validated"], share: float, **more: Any
    ) -> None:
        epoch = len(self.results) + (phase == "training") if phase != "normalisers" else 0
        self.report(Progress(phase=phase, epoch=epoch, epochs=self.settings.epochs, share=share, **more))

    def _signature(self, validation: FeatureSet) -> str:
        """What must be equal for a training to be taken up."""
        free = {"minutes": 0.0, "threads": 0, "patience": 0}
        parts = (
            msgspec.structs.replace(self.settings, **free),
            self.costs,
            self.source,
            self.token_ids,
            None
            if self.start is None
            else [(name, hashlib.sha256(w.tobytes()).hexdigest()) for name, w in self.start.weights.items()],
            *((part.starts, part.answers) for part in (self.train, validation)),
        )
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()

    def _save(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        part = self.work / (_STATE + ".part")
        torch.save(
            {
                "signature": self.signature,
                "weights": {name: w.detach() for name, w in self.trained.items()},
                "optimizer": self.optimizer.state_dict(),
                "updates": self.updates,
                "seconds": self._seconds(),
                "results": msgspec.json.encode(self.results).decode(),
                "normalisers": self.normalisers,
                "best": {name: w for name, w in self.best.items() if name != OUTPUT},
            },
            part,
        )
        part.replace(self.work / _STATE)

    def _resume(self) -> bool:
        """Takes up an earlier sitting's training, if there is one."""
        path = self.work / _STATE
        if not path.exists():
            return False
        try:
            state = torch.load(path, weights_only=True)
        except Exception as error:  # whatever a damaged file makes of the unpickler
            raise ValueError(f"{path}: cannot be read ({error!s:.200}); remove it to start anew") from error
        if state.get("signature") != self.signature:
            raise ValueError(
                f"{path}: is of a training with other answers or settings; remove it or use another folder"
            )
        with torch.no_grad():
            for name, w in self.trained.items():
                w.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
        self.before = state["seconds"]
        self.results = msgspec.json.decode(state["results"], type=list[EpochResult])
        self.best = {**state["best"], OUTPUT: self.rows}
        self.normalisers = state["normalisers"]
        return True

    def _result(self, ended: Literal["epochs", "time", "no better", "interrupted"]) -> TrainedHead:
        seconds = self._seconds()
        embedding = {self.config.embedding: self.table}
        plain = self.replay.run(self.graph, {**self.best, **embedding})
        q8, q4 = (
            self.replay.run(self.graph, {**rounded(self.best, served), **embedding})
            for served in get_args(HeadFormat)
        )
        return TrainedHead(
            config=self.config,
            token_ids=self.token_ids,
            target=self.source.target,
            taps=self.source.taps,
            weights={name: w.numpy() for name, w in self.best.items()},
            evidence=HeadEvidence(
                answers=len(self.train.answers),
                left_out=self.left_out,
                anchors=len(self.data.anchors),
                validation_tokens=self.validation_tokens,
                coverage=self.coverage,
                trained_weights=sum(w.numel() for w in self.trained.values()),
                settings=self.settings,
                costs=self.costs,
                epochs=tuple(self.results),
                best_epoch=self._best_epoch(),
                seconds=seconds,
                ended=ended,
                validation=plain,
                validation_q8=q8,
                validation_q4=q4,
            ),
            served="q8" if self.start is None else self.start.served,
        )


def _check_sources(train: FeatureSet, validation: FeatureSet, target: TargetModel) -> None:
    """Raises ValueError unless both sets are of the target as it is now."""
    if train.source != validation.source:
        raise ValueError(f"{validation.folder}: features of another target or other taps than {train.folder}")
    check_fingerprint(train.source.target, target.fingerprint(), str(train.folder))
    if train.source.taps != target.taps():
        raise ValueError(
            f"{train.folder}: features of {train.source.taps}, not {target.taps()}; make them anew"
        )
