"""Training: a head learns what can be learnt, may be stopped at any time, and tells how good it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tenfold.backends.sampling import gumbel
from tenfold.models.recurrent_head import HeadConfig, recurrent_head
from tenfold.speculate.features import Answer, FeatureSet
from tenfold.speculate.head_data import HeadData, log_normalisers
from tenfold.speculate.head_loss import EARLY, LATE, position_loss
from tenfold.speculate.head_replay import HeadReplay
from tenfold.speculate.head_weights import Standard, rounded
from tenfold.speculate.target import TargetModel
from tenfold.speculate.train_head import train_head
from tenfold.speculate.trained_head import (
    CostCurve,
    HeadFormat,
    HeadSettings,
    Progress,
    StartingHead,
    TrainedHead,
)
from tests.helpers.toy_drafting import VOCAB, feature_set, toy_answers, toy_target

QUICK = HeadSettings(epochs=4, batch=64, learning_rate=5e-3, dropout=0.0, vocab_size=VOCAB)


def trained(
    work: Path,
    settings: HeadSettings = QUICK,
    count: int = 120,
    on_progress: Callable[[Progress], object] = lambda progress: None,
) -> TrainedHead:
    target = toy_target()
    return train_head(
        toy_answers(target, count, seed=1),
        toy_answers(target, 12, seed=2),
        target,
        settings,
        CostCurve(),
        (0,),
        work,
        on_progress,
    )


def test_learns_a_function_of_the_features(tmp_path: Path) -> None:
    """A next token that follows from features and newest token is drafted right, four tokens deep, on answers
    not seen in training; and still so when the weights are rounded as they are served."""
    news: list[Progress] = []
    head = trained(tmp_path, on_progress=news.append)
    evidence = head.evidence
    for replay in (evidence.validation, evidence.validation_q8, evidence.validation_q4):
        assert replay is not None
        assert replay.acceptance[0] > 0.9
        assert replay.acceptance[3] > 0.7  # at most 20 / 23: an answer's last anchors have fewer tokens left
    assert evidence.validation.best_speed > 1.8
    assert evidence.anchors == 120 * 23
    epochs = [progress for progress in news if progress.phase == "validated"]
    assert [progress.epoch for progress in epochs] == [1, 2, 3, 4]
    assert epochs[-1].loss is not None and epochs[0].loss is not None
    assert epochs[-1].loss < epochs[0].loss / 2


def test_a_training_taken_up_is_the_one_never_stopped(tmp_path: Path) -> None:
    """Interrupted after two epochs and called again, it ends with the very same weights."""

    def stop(progress: Progress) -> None:
        if progress.phase == "training" and progress.epoch == 3:
            raise KeyboardInterrupt

    whole = trained(tmp_path / "whole")
    half = trained(tmp_path / "parts", on_progress=stop)
    assert half.evidence.ended == "interrupted"
    assert len(half.evidence.epochs) == 2
    parts = trained(tmp_path / "parts")
    assert parts.evidence.epochs == whole.evidence.epochs
    for name, weight in whole.weights.items():
        np.testing.assert_array_equal(parts.weights[name], weight)


def test_interrupted_before_an_epoch_there_is_nothing_to_keep(tmp_path: Path) -> None:
    """Ctrl-C is then passed on instead of handing over an untrained head."""

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, on_progress=stop)


def test_ends_when_its_time_is_up(tmp_path: Path) -> None:
    """The minutes given bound a training of any number of epochs, and what it hands over was replayed."""
    settings = msgspec.structs.replace(QUICK, epochs=10_000, minutes=0.02, patience=10_000)
    head = trained(tmp_path, settings)
    assert head.evidence.ended == "time"
    assert head.evidence.seconds < 10
    assert head.evidence.best_epoch >= 1


def test_a_folder_of_another_training_is_refused(tmp_path: Path) -> None:
    """A changed setting does not silently go on from, or throw away, what is there."""
    trained(tmp_path, msgspec.structs.replace(QUICK, epochs=1))
    with pytest.raises(ValueError, match="other answers or settings"):
        trained(tmp_path, msgspec.structs.replace(QUICK, epochs=2))
    (tmp_path / "training.pt").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="remove it to start anew"):
        trained(tmp_path, msgspec.structs.replace(QUICK, epochs=1))


def test_too_few_answers_and_foreign_features_are_refused(tmp_path: Path) -> None:
    """The message says what is missing, or which target the features are of."""
    with pytest.raises(ValueError, match="46 tokens to train on, fewer than the 64 of a batch"):
        trained(tmp_path, count=2)
    target, other = toy_target(), toy_target(seed=1)
    sets = toy_answers(target, 4, seed=1), toy_answers(target, 2, seed=2)
    with pytest.raises(ValueError, match="output matrix"):
        train_head(*sets, other, QUICK, CostCurve(), (0,), tmp_path)


def test_answers_that_repeat_themselves_are_left_out(tmp_path: Path) -> None:
    """Loops are easy to draft and teach nothing."""
    target = toy_target()
    good = toy_answers(target, 5, seed=1)
    loop = msgspec.structs.replace(good.answers[2], tokens=(1, 2) * 12)
    answers = (*good.answers[:2], loop, *good.answers[3:])
    mixed = FeatureSet("toy", good.source, answers, good.starts, good.features)
    settings = msgspec.structs.replace(QUICK, epochs=1)
    head = train_head(mixed, toy_answers(target, 3, seed=2), target, settings, CostCurve(), (0,), tmp_path)
    assert (head.evidence.answers, head.evidence.left_out) == (4, 1)
    assert head.evidence.anchors == 4 * 23


def test_normalisers_are_of_the_whole_vocabulary() -> None:
    """The teacher's log-probabilities of a few rows need the sum over all of them."""
    target = toy_target("gemma3-one-kv-head")
    answers = toy_answers(target, 3, seed=1, length=5).select([0, 2])
    found = log_normalisers(answers, target, 0.7).numpy()
    data = HeadData(answers, (0, 1), target.graph.hidden_size)
    logits = data.final_states(np.arange(15)).numpy() @ target.rows(target.output, range(VOCAB)).T
    expected = np.log(np.exp(3 * np.tanh(logits / 3) / 0.7).sum(axis=1))  # its logits are capped at 3
    of_answers = np.r_[0:5, 10:15]
    np.testing.assert_allclose(found[of_answers], expected[of_answers], atol=0.02)
    assert np.isnan(found[5:10]).all()


def test_losses_are_least_for_the_teacher_itself() -> None:
    """Both phases' losses are smallest where the head's distribution is the target's, and acceptance there is
    certain; a token outside of the slice is never accepted."""
    torch.manual_seed(0)
    logits = torch.randn(4, 6)
    teacher = torch.log_softmax(logits / 0.7, dim=1)
    state = torch.randn(4, 3)
    slots, sampled = torch.tensor([0, 2, 5, -1]), torch.tensor([True, True, True, True])
    for weights in (EARLY._replace(token=0.0), LATE._replace(token=0.0)):
        best = position_loss(logits, state, teacher, state, slots, sampled, weights, 0.7)
        torch.testing.assert_close(best.loss, torch.zeros(4), atol=1e-5, rtol=0)
        torch.testing.assert_close(best.accepted, torch.tensor([1.0, 1, 1, 0]))
        other = position_loss(
            logits + torch.randn(4, 6), state + 1, teacher, state, slots, sampled, weights, 0.7
        )
        assert (other.loss > best.loss).all()
    greedy = position_loss(logits, state, teacher, state, logits.argmax(1), ~sampled, EARLY, 0.7)
    torch.testing.assert_close(greedy.accepted, torch.ones(4))


def test_standardisation_moves_into_the_weights() -> None:
    """A head that is trained on standardised features drafts the same from features as they are."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(5, 8, generator=generator) * torch.arange(1, 9) + 100
    standard = Standard(features.mean(dim=0), features.std(dim=0))
    w = {"drafter.fuse.weight": torch.randn(3, 8), "drafter.fuse.bias": torch.randn(3)}
    folded = standard.fold(w)
    torch.testing.assert_close(
        torch.nn.functional.linear(features, folded["drafter.fuse.weight"], folded["drafter.fuse.bias"]),
        torch.nn.functional.linear(
            standard.apply(features), w["drafter.fuse.weight"], w["drafter.fuse.bias"]
        ),
        atol=1e-3,
        rtol=1e-3,
    )


@pytest.mark.parametrize(("format", "most"), [("q8", 0.03), ("q4", 0.5)])
def test_rounding_is_that_of_serving(format: HeadFormat, most: float) -> None:
    """Matrices of whole groups are on the format's grid, all else is untouched."""
    w = {"a": torch.randn(4, 64), "b": torch.randn(4, 33), "c": torch.randn(64)}
    served = rounded(w, format)
    assert most / 10 < (served["a"] - w["a"]).abs().max() < most
    assert served["b"] is w["b"]
    assert served["c"] is w["c"]


def made_up(target: TargetModel, answers: list[Answer]) -> FeatureSet:
    rows = sum(len(answer.tokens) for answer in answers)
    return feature_set(target, answers, np.zeros((rows, 3 * target.graph.hidden_size), np.float32))


def test_a_replay_walks_the_answer_step_by_step() -> None:
    """A step commits its drafts that stand and one token more, costs V(1 + drafts) and the drafting, and the
    next begins behind it."""
    target = toy_target()
    answer = Answer(tokens=tuple(range(9)), temperature=0.0, seed=0, position=3)
    costs = CostCurve(verify=(1.0, 1.5, 2.0), draft=0.25)
    replay = HeadReplay(made_up(target, [answer]), range(VOCAB), 64, 2, costs)
    found = replay.walk(np.array([2, 0, 0, 1, 3, 0, 0, 0]))
    assert found.anchors == 8
    assert found.acceptance == (3 / 8, 2 / 8)
    # Drafts of one: 2 tokens from 0, 1 from 2, 2 from 3, 1 each from 5, 6, 7. Of two: 3, 2, 1, 1, 1.
    assert found.tokens_per_step == (8 / 6, 8 / 5)
    assert found.speed == pytest.approx((8 / (6 * 1.75), 8 / (5 * 2.5)))
    assert found.best_speed == 1


def test_sampled_answers_are_replayed_with_the_noise_that_drew_them() -> None:
    """A head that knows no more than that all tokens are equally likely still drafts what the target drew, if
    the target knew no more either: both draw with the same noise."""
    target = toy_target()
    tokens = [3]
    ids = np.arange(VOCAB)
    for index in range(1, 20):
        tokens.append(int(np.argmax(gumbel(77, 4 + index, ids))))
    answer = Answer(tokens=tuple(tokens), temperature=0.5, seed=77, position=4)
    replay = HeadReplay(made_up(target, [answer]), range(VOCAB), 64, 3, CostCurve())
    graph = recurrent_head(
        HeadConfig(
            feature_width=192,
            state_width=64,
            mlp_width=32,
            vocab_size=VOCAB,
            embedding=target.embedding,
            target_vocab_size=VOCAB,
            embedding_scale=1.0,
        )
    )
    zeros = {name: torch.zeros(spec.shape) for name, spec in graph.first.weights.items()}
    found = replay.run(graph, zeros)
    assert found.acceptance == pytest.approx((1.0, 18 / 19, 17 / 19))


def test_a_training_goes_on_from_a_head(tmp_path: Path) -> None:
    """An epoch that hardly moves anything, on answers whose features have other statistics, leaves it as good
    as it was: its weights are brought to those and back. Its tokens stay, as far as there is room."""
    first = trained(tmp_path / "first")
    start = StartingHead(config=first.config, token_ids=first.token_ids, weights=first.weights)
    target = toy_target()
    settings = msgspec.structs.replace(QUICK, epochs=1, learning_rate=1e-9, feature_noise=0.0)
    sets = toy_answers(target, 30, seed=7), toy_answers(target, 12, seed=2)
    head = train_head(*sets, target, settings, CostCurve(), (), tmp_path / "second", start=start)
    assert head.evidence.validation.acceptance == pytest.approx(
        first.evidence.validation.acceptance, abs=0.02
    )
    assert head.token_ids == first.token_ids
    for name, weight in first.weights.items():
        np.testing.assert_allclose(head.weights[name], weight, rtol=1e-3, atol=1e-3)
