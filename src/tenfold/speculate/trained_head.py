"""What a head's training is asked for, and what it hands over. Needs no torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tenfold.backends.base import Floats
from tenfold.models.recurrent_head import HeadConfig
from tenfold.speculate.target import Fingerprint

HeadFormat = Literal["q8", "q4"]
"""What a head's matrices are held in while it serves."""


class HeadSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a head is made and trained."""

    vocab_size: int = 4096
    """Most tokens that can be drafted."""
    mlp_ratio: float = 8 / 3
    """Width of the gated layer by the target's hidden size."""
    unroll: int = 4
    """Drafts that are trained and replayed."""
    epochs: int = 6
    minutes: float = 30.0
    """Wall time after which it ends, all sittings together."""
    patience: int = 2
    """It ends once so many epochs in a row were no better."""
    batch: int = 256
    """Anchors of an update."""
    learning_rate: float = 6e-4
    weight_decay: float = 0.01
    warm_up: float = 0.04
    """Share of the training in which the learning rate rises."""
    clip: float = 1.0
    dropout: float = 0.2
    feature_noise: float = 0.1
    """Deviation of the noise on standardised features."""
    temperature: float = 0.7
    """Of the target's distribution that is learnt."""
    position_decay: float = 0.8
    """Weight of each further draft."""
    other_share: float = 0.2
    """Share of anchors with a wrong draft that are trained on nevertheless."""
    least_distinct: float = 0.6
    """Answers with a smaller share of distinct 4-grams repeat themselves and are left out."""
    seed: int = 0
    threads: int = 1


class CostCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What drafting costs on a machine, in steps of the target over one row."""

    verify: tuple[float, ...] = (1.0, 1.1, 1.2, 1.3, 1.45, 1.6, 1.75, 1.9)
    """V(1), V(2), ...: a step of the target over so many rows. V(1) is 1."""
    draft: float = 0.06
    """A step of the head."""


class Replay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What drafts of up to K tokens would have done for some answers. A step of the target commits the drafts
    that stand and one token more."""

    anchors: int
    acceptance: tuple[float, ...]
    """[K] share of anchors where the drafts up to this one all stand."""
    tokens_per_step: tuple[float, ...]
    """[K] for drafts of fixed length 1 to K."""
    speed: tuple[float, ...]
    """[K] tokens per unit of cost; without drafting it is 1."""

    @property
    def best_speed(self) -> float:
        """With the best fixed length, or without drafts where none pays."""
        return max(1.0, *self.speed)

    @property
    def best_length(self) -> int:
        """The best fixed length."""
        return 1 + self.speed.index(max(self.speed))


class Pace(NamedTuple):
    """How fast answers went, each an array by answer. An answer's first token is drawn by its prompt."""

    tokens: npt.NDArray[np.int64]
    """Committed by steps."""
    steps: npt.NDArray[np.int64]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a training is."""

    phase: Literal["normalisers", "training", "validated"]
    epoch: int
    """1 is the first."""
    epochs: int
    share: float
    """Of the phase, 0 to 1; in ``training`` of the whole training."""
    loss: float | None = None
    """Mean of the epoch so far."""
    replay: Replay | None = None
    """On the validation answers, after an epoch."""
    best: bool = False
    """It is the best epoch so far."""


class EpochResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An epoch, for the evidence."""

    epoch: int
    loss: float
    acceptance: tuple[float, ...]
    speed: float


class HeadEvidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a head was trained on and how well it did."""

    answers: int
    left_out: int
    """Answers that repeat themselves."""
    anchors: int
    validation_tokens: int
    coverage: float
    """Share of the validation answers' tokens that can be drafted."""
    trained_weights: int
    settings: HeadSettings
    costs: CostCurve
    epochs: tuple[EpochResult, ...]
    best_epoch: int
    seconds: float
    """Wall time of the training."""
    ended: Literal["epochs", "time", "no better", "interrupted"]
    validation: Replay
    """Of the weights that were kept, in float32."""
    validation_q8: Replay
    """The same rounded to q8."""
    validation_q4: Replay | None = None
    """The same rounded to q4; None in a drafter that is older than the choice."""

    def validation_in(self, served: HeadFormat) -> Replay | None:
        """The validation's replay by a head that is held so."""
        return self.validation_q8 if served == "q8" else self.validation_q4


class StartingHead(msgspec.Struct, frozen=True, kw_only=True):
    """A head that a training goes on from."""

    config: HeadConfig
    token_ids: tuple[int, ...]
    weights: dict[str, Floats]
    """All but the embedding table, for features as the target hands them back."""
    served: HeadFormat = "q8"


class TrainedHead(msgspec.Struct, frozen=True, kw_only=True):
    """A head, ready to be saved."""

    config: HeadConfig
    token_ids: tuple[int, ...]
    """The target's token of each output row, ascending."""
    target: Fingerprint
    taps: tuple[str, ...]
    weights: dict[str, Floats]
    """All but the embedding table, for features as the target hands them back."""
    evidence: HeadEvidence
    served: HeadFormat = "q8"
