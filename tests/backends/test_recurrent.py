"""Recurrent programs: drafts are those of the definition, with the target's own noise, and depend on their
sequence alone."""

from __future__ import annotations

import functools
import threading
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenfold.backends.base import MOST_DRAFTS, CompileOptions, UnrollOutput
from tenfold.backends.native import NativeRecurrent
from tenfold.backends.torch.reference import TorchBackend
from tenfold.checkpoint.base import CheckpointError
from tenfold.graph.builder import GraphBuilder
from tenfold.graph.graph import Graph
from tenfold.graph.recurrent import RecurrentGraph
from tests.helpers.batches import Part, step_batch
from tests.helpers.memory_checkpoint import DictCheckpoint
from tests.helpers.native_programs import FORMATS, LEVELS, FormatName, TinyModel, logits_of, tiny_model
from tests.helpers.recurrent_graphs import TinyHead, head_graph, part, unroll_batch
from tests.helpers.tiny_models import CONFIGS

HEAD = TinyHead(head_graph(), 160)
# More rows than one piece of a draw (512), and not a multiple of anything.
WIDE = TinyHead(head_graph(vocab=1300, rows=1117, hidden=32, inner=32, features=32), 1300)


@functools.cache
def native(wide: bool, weights: FormatName, threads: int, isa: str) -> NativeRecurrent:
    return (WIDE if wide else HEAD).native(weights, threads=threads, isa=isa)


def agreement(found: UnrollOutput, exact: UnrollOutput) -> tuple[int, int, float]:
    """Tokens of the oracle that were compared; how many of them are the same, each sequence up to its first
    other one; the largest difference of a log-probability among those."""
    compared = same = 0
    worst = 0.0
    for s in range(len(exact.tokens)):
        for k in range(int((exact.tokens[s] >= 0).sum())):
            compared += 1
            if found.tokens[s, k] != exact.tokens[s, k]:
                break
            same += 1
            worst = max(worst, abs(float(found.logprobs[s, k] - exact.logprobs[s, k])))
    return compared, same, worst


@pytest.mark.parametrize("head", [HEAD, WIDE], ids=["head", "wide"])
@pytest.mark.parametrize(
    ("weights", "missed", "tolerance"),
    [("f32", 0.0, 2e-5), ("bf16", 0.0, 2e-5), ("q8", 0.1, 0.2), ("q4", 0.1, 0.2)],
)
def test_drafts_are_those_of_the_reference(
    head: TinyHead, weights: FormatName, missed: float, tolerance: float
) -> None:
    """Warm and at temperature 0: the same tokens, and log-probabilities that are near. With 8-bit activations
    two scores that are near one another may change places, and all that follows with them; up to there."""
    program, oracle = head.native(weights), head.torch(weights)
    compared = same = 0
    for seed, temperature in enumerate([0.0, 0.4, 1.0, 1.7]):
        batch = unroll_batch(head, [6, 1, 8, 3, 5, 2, 8, 7], seed=seed, temperature=temperature)
        exact, found = oracle.unroll(batch), program.unroll(batch)
        assert found.tokens.shape == found.logprobs.shape == (8, 8)
        for output in (exact, found):
            np.testing.assert_array_equal((output.tokens >= 0).sum(axis=1), batch.lengths)
            assert set(output.tokens[output.tokens >= 0]) <= set(head.token_ids)
        few, alike, worst = agreement(found, exact)
        assert worst <= tolerance
        compared, same = compared + few, same + alike
    assert compared - same <= missed * compared


def test_a_sequence_ends_at_its_floor() -> None:
    """The token that takes the product of probabilities below the floor is the last, in both backends alike;
    a floor of 0 or below never ends a sequence, one above 1 ends it after its first token."""
    floors = [0.0, -1.0, 1e-30, 1e-9, 1e-5, 1e-2, 0.5, 2.0]
    for temperature in (0.0, 1.0):
        batch = unroll_batch(HEAD, [12] * 8, temperature=temperature, floor=floors)
        exact, found = HEAD.torch("f32").unroll(batch), native(False, "f32", 1, LEVELS[0]).unroll(batch)
        np.testing.assert_array_equal(found.tokens, exact.tokens)
        free = HEAD.torch("f32").unroll(msgspec.structs.replace(batch, floor=np.zeros(8, np.float32)))
        for s, floor in enumerate(floors):
            products = np.exp(np.cumsum(free.logprobs[s].astype(np.float64)))
            drafted = int((found.tokens[s] >= 0).sum())
            assert drafted == min(int((products >= floor).sum()) + 1, 12)
            np.testing.assert_array_equal(found.tokens[s, :drafted], free.tokens[s, :drafted])
            assert (found.logprobs[s, drafted:] == 0).all()
        ended = {int((row >= 0).sum()) for row in found.tokens}
        assert len(ended) > 3  # the floors cut at different lengths, or nothing was tested


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    wide=st.booleans(),
    weights=st.sampled_from(FORMATS),
    threads=st.integers(1, 3),
    isa=st.sampled_from(LEVELS),
)
def test_neighbours_threads_and_levels_change_no_bit(
    data: st.DataObject, wide: bool, weights: FormatName, threads: int, isa: str
) -> None:
    """A sequence's drafts and log-probabilities are the same alone on one thread and beside any others, in
    any order, that end before it, after it or with it, on any team and ISA level."""
    head = WIDE if wide else HEAD
    count = data.draw(st.integers(1, 8))
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=count, max_size=count))
    warm = data.draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 5.0]), min_size=count, max_size=count))
    floors = data.draw(st.lists(st.sampled_from([0.0, 1e-6, 1e-3, 0.1]), min_size=count, max_size=count))
    batch = unroll_batch(head, lengths, seed=data.draw(st.integers(0, 999)), temperature=warm, floor=floors)
    found = native(wide, weights, threads, isa).unroll(batch)
    single = native(wide, weights, 1, LEVELS[0])
    for s in range(count):
        own = single.unroll(part(batch, [s]))
        drafted = int((own.tokens[0] >= 0).sum())
        assert drafted >= 1
        assert (found.tokens[s, drafted:] == -1).all()
        np.testing.assert_array_equal(found.tokens[s, :drafted], own.tokens[0, :drafted])
        np.testing.assert_array_equal(found.logprobs[s, :drafted], own.logprobs[0, :drafted])


def target_and_copy(width: int, vocab: int) -> tuple[Graph, RecurrentGraph]:
    """A target whose next token follows from the last one alone, and a recurrent graph with its very logits:
    features and state are multiplied by 0 and added."""

    def logits(b: GraphBuilder, handed_in: str | None) -> str:
        x = b.embed("model.embed_tokens.weight", vocab, width)
        if handed_in is not None:
            x = b.add(x, b.scale(b.input(handed_in, width), 0.0))
        b.linear(b.rms_norm(b.select_rows(x), "norm.weight", 1e-5), "out.weight", vocab)
        return x

    def build(b: GraphBuilder) -> Graph:
        return b.build(hidden_size=width, vocab_size=vocab, max_context=64)

    b, first, next_ = GraphBuilder("target"), GraphBuilder("first"), GraphBuilder("next")
    logits(b, None)
    states = logits(first, "features"), logits(next_, "state")
    copy = RecurrentGraph(
        first=build(first), next=build(next_), state_output=states, feature_width=width, state_width=width
    )
    return build(b), copy


@pytest.mark.parametrize("weights", FORMATS)
def test_a_draft_with_the_targets_logits_is_the_targets_token(weights: FormatName) -> None:
    """Rows in any order, over any part of the vocabulary: whoever has the target's logits draws what the
    target draws when it may draw from those rows alone, at every position, with the same log-probability."""
    vocab = 600
    graph, copy = target_and_copy(64, vocab)
    model = TinyModel(graph)
    target = model.native(weights, kv_pages=1)
    for rows in (vocab, 333):
        ids = np.random.default_rng(rows).permutation(vocab)[:rows].astype(np.int32)
        sliced = msgspec.structs.replace(
            copy, first=sliced_output(copy.first, rows), next=sliced_output(copy.next, rows)
        )
        matrices = model.checkpoint._weights
        head = TinyHead(sliced, vocab, **{**matrices, "out.weight": matrices["out.weight"][ids]})
        head.token_ids = ids
        batch = unroll_batch(head, [20] * 6, temperature=[0.0, 0.0, 0.5, 1.0, 1.0, 2.0])
        drafts = head.native(weights).unroll(batch)
        forbidden = np.setdiff1d(np.arange(vocab), ids).astype(np.int32)
        for s in range(6):
            token = int(batch.tokens[s])
            for k in range(20):
                step = step_batch(Part(tokens=[token], pages=[0]))
                sampling = msgspec.structs.replace(
                    step.sampling,
                    temperature=batch.temperature[s : s + 1],
                    seed=batch.seed[s : s + 1],
                    position=batch.position[s : s + 1] + k,
                    bias_offsets=np.array([0, len(forbidden)], np.int32),
                    bias_tokens=forbidden,
                    bias_values=np.full(len(forbidden), -np.inf, np.float32),
                )
                output = target.step(msgspec.structs.replace(step, sampling=sampling))
                token = int(output.tokens[0])
                assert drafts.tokens[s, k] == token
                assert output.logits is not None
                scaled = output.logits[0, ids].astype(np.float64) / (batch.temperature[s] or 1.0)
                chance = scaled[ids == token][0] - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()
                assert abs(drafts.logprobs[s, k] - chance) < 1e-4


def sliced_output(graph: Graph, rows: int) -> Graph:
    """The graph with so many rows of its output matrix."""
    last: Any = graph.ops[-1]
    last = msgspec.structs.replace(
        last, weight=msgspec.structs.replace(last.weight, shape=(rows, last.weight.shape[1]))
    )
    return msgspec.structs.replace(
        graph, ops=(*graph.ops[:-1], last), widths={**graph.widths, last.output: rows}, vocab_size=rows
    )


def test_weights_of_both_graphs_are_packed_once() -> None:
    """What the first step and the next ones name is in memory once."""
    core = HEAD.native("f32")._core
    names = {**HEAD.graph.first.weights, **HEAD.graph.next.weights}
    shapes = [spec.shape for spec in names.values() if len(spec.shape) == 2]
    packed = sum(-(-rows // 16) * 16 * cols * 4 for rows, cols in shapes)
    assert core.program.weight_bytes() == packed


def test_broken_features_draft_nothing() -> None:
    """Features that are no numbers give no draft, and harm neither the neighbours nor later calls."""
    batch = unroll_batch(HEAD, [4, 4, 4])
    program = native(False, "q8", 1, LEVELS[0])
    wanted = program.unroll(batch)
    broken = msgspec.structs.replace(batch, features=batch.features.copy())
    broken.features[1] = np.nan
    found = program.unroll(broken)
    assert (found.tokens[1] == -1).all()
    np.testing.assert_array_equal(found.tokens[[0, 2]], wanted.tokens[[0, 2]])
    np.testing.assert_array_equal(program.unroll(batch).logprobs, wanted.logprobs)


def one(array: npt.NDArray[Any], value: Any) -> npt.NDArray[Any]:
    """The array with another first entry."""
    changed = array.copy()
    changed[0] = value
    return changed


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "token": ({"tokens": 160}, "vocabulary"),
    "negative token": ({"tokens": -1}, "vocabulary"),
    "length 0": ({"lengths": 0}, "lengths"),
    "length": ({"lengths": MOST_DRAFTS + 1}, "lengths"),
    "temperature": ({"temperature": -0.5}, "temperature"),
    "no temperature": ({"temperature": np.nan}, "temperature"),
    "endless temperature": ({"temperature": np.inf}, "temperature"),
    "floor": ({"floor": np.nan}, "floor"),
}


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_batches_that_do_not_fit_are_refused(backend: str) -> None:
    """Each wrong number, length of an array and number of sequences is named, and the next call is fine."""
    program: Any = HEAD.native("f32") if backend == "native" else HEAD.torch("f32")
    batch = unroll_batch(HEAD, [2, 3])
    wanted = program.unroll(batch)
    for changes, names in WRONG.values():
        wrong = {name: one(getattr(batch, name), value) for name, value in changes.items()}
        with pytest.raises(ValueError, match=f"unroll: .*{names}"):
            program.unroll(msgspec.structs.replace(batch, **wrong))
    for name in ("seed", "position", "temperature", "lengths", "floor"):
        with pytest.raises(ValueError, match=f"unroll: {name}"):
            program.unroll(msgspec.structs.replace(batch, **{name: getattr(batch, name)[:1]}))
    with pytest.raises(ValueError, match="features"):
        program.unroll(msgspec.structs.replace(batch, features=batch.features[:, :-1].copy()))
    for count in (0, 9):
        with pytest.raises(ValueError, match=f"{count} sequences"):
            program.unroll(part(unroll_batch(HEAD, [1] * 9), range(count)))
    np.testing.assert_array_equal(program.unroll(batch).tokens, wanted.tokens)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_what_cannot_be_compiled_is_refused(backend: str) -> None:
    """Ids that do not fit the rows or the vocabulary, weights that are not there, an embedding that is too
    short, and other numbers of threads than the shared team's, are named."""
    compile_: Any = HEAD.native if backend == "native" else HEAD.torch
    for ids, names in [
        (HEAD.token_ids[:-1], "shape"),
        (one(HEAD.token_ids, 160), "160 is not in the vocabulary of 160"),
        (one(HEAD.token_ids, -1), "-1 is not"),
        (one(HEAD.token_ids, HEAD.token_ids[1]), "more than one row"),
    ]:
        with pytest.raises(ValueError, match=f"token_ids: .*{names}"):
            compile_("f32", token_ids=ids)
    with pytest.raises(ValueError, match=r"embed_tokens.*160 rows for a vocabulary of 161"):
        compile_("f32", vocab_size=161)
    with pytest.raises(ValueError, match="max_sequences"):
        compile_("f32", max_sequences=0)
    with pytest.raises(ValueError, match="isa"):
        compile_("f32", isa="avx1024")
    short = TinyHead(HEAD.graph, 160)
    del short.checkpoint._weights["head.up.weight"]
    with pytest.raises(CheckpointError, match=r"head\.up\.weight"):
        (short.native if backend == "native" else short.torch)("f32")


def test_shared_threads() -> None:
    """A head on the threads of its target starts none of its own, computes the same, outlives the target, and
    is refused (as the target is) while the other one runs."""
    model = tiny_model({**CONFIGS["llama"], "max_position_embeddings": 512})
    target = model.native("q8", threads=2, max_rows=256, kv_pages=16)
    batch = unroll_batch(HEAD, [40] * 8)
    step = step_batch(Part(tokens=list(range(96)) * 2, pages=list(range(12))))
    wanted, logits = HEAD.native("q8").unroll(batch), logits_of(target, step)
    before = threading_tasks()
    head = HEAD.native("q8", threads=0, team_of=target)
    assert threading_tasks() == before
    np.testing.assert_array_equal(head.unroll(batch).tokens, wanted.tokens)

    wrong: list[str] = []
    refused = {"step": 0, "unroll": 0}
    done = threading.Event()

    def work(name: str) -> None:
        while not done.is_set():
            try:
                if name == "step":
                    same = np.array_equal(logits_of(target, step), logits)
                else:
                    same = np.array_equal(head.unroll(batch).logprobs, wanted.logprobs)
                if not same:
                    wrong.append(name)
            except ValueError as error:
                refused[name] += 1
                if "shares its threads" not in str(error):
                    wrong.append(str(error))
            if sum(refused.values()) >= 5:
                done.set()

    threads = [threading.Thread(target=work, args=(name,)) for name in refused]
    for thread in threads:
        thread.start()
    done.wait(30)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong and sum(refused.values()) >= 5
    np.testing.assert_array_equal(logits_of(target, step), logits)

    with pytest.raises(ValueError, match="threads: 3 asked for"):
        HEAD.native("q8", threads=3, team_of=target)
    target.close()
    np.testing.assert_array_equal(head.unroll(batch).logprobs, wanted.logprobs)
    with pytest.raises(ValueError, match="team_of"):
        HEAD.native("q8", threads=0, team_of=target)


def threading_tasks() -> int:
    """Threads of this process, whoever started them."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


def test_inputs_belong_to_recurrent_programs() -> None:
    """A graph with a value that is handed in cannot be compiled as a model: a step hands nothing in."""
    graph = HEAD.graph.next
    with pytest.raises(ValueError, match="recurrent programs"):
        TinyModel(graph).native("f32")
    checkpoint = DictCheckpoint({}, {})
    with pytest.raises(ValueError, match=r"input 'state'.*recurrent programs"):
        TorchBackend().compile(graph, checkpoint, CompileOptions(kv_pages=1))
