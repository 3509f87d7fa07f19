"""A drafter's folder gives back what was saved, beside the target it was made for and beside no other."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tenfold.checkpoint.base import CheckpointError
from tenfold.models.recurrent_head import OUTPUT, HeadConfig, recurrent_head
from tenfold.speculate.drafter_folder import open_drafter, save_drafter, serve_in
from tenfold.speculate.target import TargetModel
from tenfold.speculate.trained_head import HeadFormat, TrainedHead
from tests.helpers.tiny_models import random_weights
from tests.helpers.toy_drafting import EVIDENCE, toy_target


def some_head(target: TargetModel) -> TrainedHead:
    config = HeadConfig(
        feature_width=192,
        state_width=64,
        mlp_width=96,
        vocab_size=5,
        embedding=target.embedding,
        target_vocab_size=96,
        embedding_scale=1.25,
    )
    weights = random_weights(recurrent_head(config).first)
    del weights[target.embedding]
    return TrainedHead(
        config=config,
        token_ids=(0, 4, 17, 40, 95),
        target=target.fingerprint(),
        taps=target.taps(),
        weights=weights,
        evidence=EVIDENCE,
    )


def test_a_saved_drafter_is_opened_with_the_weights_it_shares(tmp_path: Path) -> None:
    """Graph, tokens, taps and evidence come back equal, every weight of the graph is found (matrices to the
    precision of F16), and the embedding is the target's own."""
    target = toy_target()
    head = some_head(target)
    save_drafter(tmp_path / "drafter", head)
    save_drafter(tmp_path / "drafter", head)  # again, over what is there
    opened = open_drafter(tmp_path / "drafter", target)
    assert opened.graph == recurrent_head(head.config)
    assert opened.description.token_ids == head.token_ids
    assert opened.description.taps == head.taps
    assert opened.description.evidence == EVIDENCE
    checkpoint = opened.checkpoint
    for name, spec in opened.graph.first.weights.items():
        assert checkpoint.tensors()[name].shape == spec.shape
        if name == target.embedding:
            layout = checkpoint.place(name, "auto").layout
            found = np.concatenate([block.dequantize() for _, block in checkpoint.rows(name, layout)])
            np.testing.assert_array_equal(found, target.rows(name, range(96)))
        else:
            np.testing.assert_allclose(checkpoint.own(name), head.weights[name], rtol=5e-4, atol=1e-6)
    assert checkpoint.place(OUTPUT, "bf16").layout.format.value == "bf16"
    opened.close()
    assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == [
        "drafter.json",
        "head.safetensors",
    ]


@pytest.mark.parametrize("served", ["q8", "q4"])
def test_a_head_is_served_as_its_folder_says(tmp_path: Path, served: HeadFormat) -> None:
    """Its bytes are what a draft costs: no matrix of it may be wider in memory than was chosen, whatever the
    file holds it in (F16, which is widened to F32 elsewhere). Eight bits until something else is chosen; a
    training that goes on from the head is told."""
    target = toy_target()
    save_drafter(tmp_path, some_head(target))
    if served != "q8":
        serve_in(tmp_path, served)
    opened = open_drafter(tmp_path, target)
    assert opened.start().served == served
    matrices = [name for name in opened.checkpoint.own_names if opened.checkpoint.own(name).ndim == 2]
    assert len(matrices) >= 5
    for name in matrices:
        columns = opened.checkpoint.own(name).shape[1]
        kept = opened.checkpoint.place(name, "auto").layout.format.value
        assert kept == (served if columns % 32 == 0 else "bf16"), name
    opened.close()


def test_closing_a_drafter_leaves_its_target_open(tmp_path: Path) -> None:
    """The target is served on when a drafter is exchanged."""
    target = toy_target()
    save_drafter(tmp_path, some_head(target))
    open_drafter(tmp_path, target).close()
    assert target.rows(target.embedding, [1]).shape == (1, 64)


def test_another_target_is_refused(tmp_path: Path) -> None:
    """A drafter beside a target with other weights would never be right, and nobody would know why."""
    save_drafter(tmp_path, some_head(toy_target()))
    with pytest.raises(ValueError, match=r"output matrix .*train a drafter for this target"):
        open_drafter(tmp_path, toy_target(seed=1))


def edited(path: Path, **changes: object) -> None:
    description = json.loads((path / "drafter.json").read_text())
    (path / "drafter.json").write_text(json.dumps({**description, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "block"}, "kind"),
        ({"version": 2}, "version"),
        ({"token_ids": [0, 4, 17, 95, 40]}, "ascending"),
        ({"token_ids": [0, 4, 17, 40, 96]}, "beyond the target's vocabulary of 96"),
        ({"token_ids": [0, 4]}, "not head.vocab_size"),
        ({"surprise": 1}, "surprise"),
        ({"weights_sha256": "0"}, "not the weights that drafter.json describes"),
        ({"taps": ["add.1"]}, "taps add.1 are not this target's"),
    ],
)
def test_a_description_that_does_not_hold_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    """Other kinds and versions, tokens that are not those of the rows, exchanged weights: each is an error
    that says so."""
    save_drafter(tmp_path, some_head(toy_target()))
    edited(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        open_drafter(tmp_path, toy_target())


def test_what_is_no_drafter_is_called_that(tmp_path: Path) -> None:
    """An empty folder and a path that is not there."""
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match="not a drafter"):
            open_drafter(path, toy_target())


def test_weights_that_diverged_are_not_saved(tmp_path: Path) -> None:
    """A head of infinities would be written only to be refused when it is served."""
    head = some_head(toy_target())
    weights = {**head.weights, OUTPUT: np.full_like(head.weights[OUTPUT], 1e6)}
    with pytest.raises(ValueError, match=r"drafter.output.weight.*diverged"):
        save_drafter(tmp_path, msgspec.structs.replace(head, weights=weights))
    assert not (tmp_path / "drafter.json").exists()
