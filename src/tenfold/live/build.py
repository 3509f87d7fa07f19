"""From a drafter's folder to a speculator that learns."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

from tenfold.backends.base import Program, RecurrentProgram
from tenfold.checkpoint.base import Checkpoint
from tenfold.checkpoint.open import open_checkpoint
from tenfold.graph.graph import Graph
from tenfold.live.capture import LiveCapture
from tenfold.live.folder import LiveFolder
from tenfold.live.head import LiveHead
from tenfold.live.learner import Learner, LearnSettings
from tenfold.live.speculator import LearningSpeculator
from tenfold.live.store import LiveStore
from tenfold.models.registry import build_graph
from tenfold.speculate.build import compile_head, drafter_taps
from tenfold.speculate.controller import Controller
from tenfold.speculate.cost_curve import measure_curve
from tenfold.speculate.suffix import SuffixDrafter
from tenfold.traffic.store import Identity

log = logging.getLogger(__name__)


def build_learning(
    program: Program,
    graph: Graph,
    checkpoint: Checkpoint,
    model: Path,
    drafter: Path,
    settings: LearnSettings | None = None,
) -> LearningSpeculator:
    """As `build_speculator` with a drafter, of which the head that was live last is taken up; learns in the
    drafter's folder. ``model``: where ``checkpoint`` is.

    Raises ValueError where nothing can be drafted or trained, for a drafter of another target, and for a
    folder in which another server learns; CheckpointError for a folder that is no drafter; OSError.
    """
    if find_spec("torch") is None:
        raise ValueError("learning (--learn) needs torch, which is not installed; try: pip install torch")
    if program.info.max_rows < 2 or program.info.max_logit_rows < 2:
        raise ValueError(
            "learning (--learn) needs room for drafts; raise max_batch_tokens (--max-batch-tokens) to 2"
        )
    # Also if another is live: the folder must be a drafter.
    own = compile_head(program, graph, checkpoint, drafter)
    folder = LiveFolder(drafter)
    try:
        live = _resume(folder, program, graph, checkpoint, own)
        identity = Identity.of(model, program.info, graph, drafter_taps(graph, checkpoint))
        store = LiveStore(folder.path, identity)
    except BaseException:
        folder.close()
        raise

    def load(path: Path) -> RecurrentProgram:
        reopened = open_checkpoint(model)
        try:
            return compile_head(program, build_graph(reopened.config), reopened, path)
        finally:
            reopened.close()

    head = LiveHead(live)
    controller = Controller([SuffixDrafter(), head], measure_curve(program), wants_features=True)
    learner = Learner(folder, store, head, load, model, settings or LearnSettings())
    return LearningSpeculator(controller, LiveCapture(identity.width), learner)


def _resume(
    folder: LiveFolder, program: Program, graph: Graph, checkpoint: Checkpoint, own: RecurrentProgram
) -> RecurrentProgram:
    """The head that was live when a server learnt here last."""
    if not folder.state.live:
        return own
    path = folder.head(folder.state.live)
    try:
        live = compile_head(program, graph, checkpoint, path)
    except (ValueError, OSError) as error:
        log.error("the head in %s does not load (%s): the drafter's own is live again", path, error)
        folder.state.live = folder.state.before = 0
        folder.save()
        return own
    own.close()
    return live
