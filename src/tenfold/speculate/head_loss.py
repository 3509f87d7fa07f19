"""What a head is trained for, at one position of a draft."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tenfold.backends.torch.functions import Tensor


class LossWeights(NamedTuple):
    """How the parts of the loss are weighed."""

    token: float
    """Cross-entropy of the token that the target drew."""
    kl: float
    """Kullback-Leibler divergence from the target's distribution."""
    tv: float
    """Total variation distance to it: the share of tokens that would be refused."""
    state: float
    """Mean square distance to the target's next final state, relative to that state's mean square."""


EARLY = LossWeights(token=0.1, kl=0.9, tv=0.0, state=0.1)
LATE = LossWeights(token=0.1, kl=0.1, tv=1.8, state=0.1)
"""KL draws a head near from anywhere; total variation is what counts, but is flat far away (DSpark's loss,
arXiv 2607.05147, and LK losses, arXiv 2602.23881)."""


class PositionLoss(NamedTuple):
    """By row."""

    loss: Tensor
    """``[n]`` with gradient."""
    accepted: Tensor
    """``[n]`` probability that the token drawn by the target would have been this head's draft too."""


def position_loss(
    logits: Tensor,
    state: Tensor,
    teacher: Tensor,
    teacher_state: Tensor,
    slots: Tensor,
    sampled: Tensor,
    weights: LossWeights,
    temperature: float,
) -> PositionLoss:
    """The loss of ``logits`` ``[n, rows]`` and of ``state`` ``[n, hidden]``, which they were made of.

    ``teacher`` are the target's log-probabilities of the drafter's rows, at ``temperature`` and over the
    whole vocabulary (their exponentials add up to less than one), ``slots`` the rows of the tokens drawn (-1:
    not among them), ``sampled`` whether they were drawn at a temperature above 0.
    """
    own = torch.log_softmax(logits / temperature, dim=1)
    likely = teacher.exp()
    inside = slots >= 0
    at = slots.clamp(min=0)[:, None]
    own_drawn = own.gather(1, at)[:, 0]
    loss = weights.token * torch.where(inside, -own_drawn, 0.0)
    if weights.kl:
        loss = loss + weights.kl * (likely * (teacher - own)).sum(dim=1)
    if weights.tv:
        loss = loss + weights.tv * (1 - torch.minimum(likely, own.exp()).sum(dim=1))
    distance = (state - teacher_state).square().mean(dim=1) / teacher_state.square().mean(dim=1)
    loss = loss + weights.state * distance
    with torch.no_grad():
        stands = (own_drawn - teacher.gather(1, at)[:, 0]).exp().clamp(max=1.0)
        same = (logits.argmax(dim=1) == slots).float()
        accepted = torch.where(sampled, stands * inside, same)
    return PositionLoss(loss, accepted)
