"""The disk tier's folder: what it gives back is what was stored, whatever happened to its files."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tenfold.kv.disk import DiskTier, NoRoom, least_disk_bytes
from tenfold.kv.segment import token_bytes

PAGE = 96
SIZE = 32 * 2048
"""Of a tier: segments of 2 KiB, a few runs each."""


def content(namespace: str, tokens: list[int]) -> bytes:
    """What the page at the end of a chain holds."""
    return random.Random(f"{namespace}/{tokens}").randbytes(PAGE)


def key_of(namespace: str, tokens: list[int]) -> int:
    """The key of the page at the end of a chain."""
    return hash((len(namespace), tuple(tokens)))


def store(tier: DiskTier, namespace: str, tokens: list[int], first: int, count: int) -> bool:
    """Stores pages of a chain."""
    chains = [tokens[: 16 * (first + i + 1)] for i in range(count)]
    return tier.append(
        namespace.encode(),
        token_bytes(chains[-1]),
        first,
        [key_of(namespace, chain) for chain in chains],
        [memoryview(content(namespace, chain)) for chain in chains],
    )


def fetch(tier: DiskTier, namespace: str, tokens: list[int]) -> bytes | None:
    """The last page of a chain, if the tier has it; where it lies twice, from a place that is good."""
    while (place := tier.find(key_of(namespace, tokens))) is not None:
        view = memoryview(bytearray(PAGE))
        if tier.read([place], namespace.encode(), token_bytes(tokens), [view]):
            return bytes(view)
        tier.forget([place])
    return None


def crash(tier: DiskTier) -> None:
    """The process of a tier is gone, and cleaned nothing up."""
    if tier._own is not None:
        os.close(tier._own_file)
        tier._own = None
    tier.close()


def chain(seed: int, pages: int) -> list[int]:
    """Tokens of a chain; those of other seeds begin differently."""
    drawn = random.Random(seed)
    return [drawn.randrange(1000) for _ in range(16 * pages)]


parts = st.floats(0, 1, exclude_max=True)
"""Which of some things, whose number is not known when a test is drawn: files have random names."""


class AnyDisk(RuleBasedStateMachine):
    """Two processes that store and fetch, crash in the middle of a write, lose files and find bytes
    changed."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.tiers = [self.open(), self.open()]
        self.fresh: list[tuple[str, list[int]]] = []
        """Chains stored since anything bad happened, newest last."""
        self.damaged: set[Path] = set()
        """Segments that something happened to: what is behind a damaged head cannot be found by others."""

    def open(self) -> DiskTier:
        """A tier as a process opens it."""
        tier = DiskTier(self.root, "identity", PAGE, SIZE)
        tier.refresh()
        return tier

    def files(self) -> list[Path]:
        """All segments."""
        return sorted(self.root.glob("*/*.kv"))

    @rule(
        who=st.integers(0, 1),
        seed=st.integers(0, 5),
        first=st.integers(0, 3),
        count=st.integers(1, 5),
        namespace=st.sampled_from(["", "other"]),
    )
    def store(self, who: int, seed: int, first: int, count: int, namespace: str) -> None:
        """A run of a chain."""
        tokens = chain(seed, 8)
        try:
            stored = store(self.tiers[who], namespace, tokens, first, count)
        except FileNotFoundError:  # its segment was deleted; it begins another
            stored = store(self.tiers[who], namespace, tokens, first, count)
        assert stored
        if self.tiers[who]._own not in self.damaged:
            self.fresh.append((namespace, tokens[: 16 * (first + count)]))

    @rule(who=st.integers(0, 1), seed=st.integers(0, 5), pages=st.integers(1, 8))
    def fetch(self, who: int, seed: int, pages: int) -> None:
        """What comes back is right, or nothing."""
        self.tiers[who].refresh()
        tokens = chain(seed, pages)
        for namespace in ("", "other"):
            assert fetch(self.tiers[who], namespace, tokens) in (None, content(namespace, tokens))

    @precondition(lambda self: self.fresh)
    @rule(who=st.integers(0, 1))
    def fetch_newest(self, who: int) -> None:
        """What was stored last is there for all."""
        namespace, tokens = self.fresh[-1]
        self.tiers[who].refresh()
        assert fetch(self.tiers[who], namespace, tokens) == content(namespace, tokens)

    @rule(who=st.integers(0, 1), torn=st.booleans(), part=parts)
    def crash(self, who: int, torn: bool, part: float) -> None:
        """A process ends at any byte of a write; another takes its place."""
        tier = self.tiers[who]
        own, end = tier._own, tier._end
        if own is not None and own.exists() and torn:
            before = own.read_bytes()
            store(tier, "", chain(99, 4), 0, 4)
            if tier._own == own:
                after = own.read_bytes()
                # Payload first, then the head: the crash comes after so many bytes of both.
                head = tier._end - end - 4 * PAGE
                order = [*range(end + head, tier._end), *range(end, end + head)]
                written = bytearray(before.ljust(len(after), b"\0"))
                for at in order[: int(part * len(order))]:
                    written[at] = after[at]
                own.write_bytes(written)
        crash(tier)
        self.tiers[who] = self.open()
        tokens = chain(99, 4)
        assert fetch(self.tiers[who], "", tokens) in (None, content("", tokens))

    @rule(who=st.integers(0, 1))
    def restart(self, who: int) -> None:
        """A process ends in order, and starts again."""
        self.tiers[who].close()
        self.tiers[who] = self.open()

    @rule(which=parts, part=parts, value=st.binary(min_size=1, max_size=1))
    def corrupt(self, which: float, part: float, value: bytes) -> None:
        """A byte changes."""
        self.fresh.clear()
        files = [path for path in self.files() if path.stat().st_size]
        if files:
            path = files[int(which * len(files))]
            self.damaged.add(path)
            with path.open("r+b") as file:
                file.seek(int(part * path.stat().st_size))
                file.write(value)

    @rule(which=parts, part=parts, gone=st.booleans())
    def shorten(self, which: float, part: float, gone: bool) -> None:
        """A file is cut, or gone."""
        self.fresh.clear()
        files = self.files()
        if files:
            path = files[int(which * len(files))]
            self.damaged.add(path)
            if gone:
                path.unlink()
            else:
                os.truncate(path, int(part * path.stat().st_size))

    @rule()
    def sweep(self) -> None:
        """Somebody deletes the folder."""
        shutil.rmtree(self.root / "identity", ignore_errors=True)
        self.fresh.clear()

    @invariant()
    def bounded(self) -> None:
        """All files together are no more than the tier may have."""
        assert sum(path.stat().st_size for path in self.files()) <= SIZE

    def teardown(self) -> None:
        """Nothing stays open."""
        for tier in self.tiers:
            tier.close()
        shutil.rmtree(self.root)


TestAnyDisk = AnyDisk.TestCase
TestAnyDisk.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_collision_costs_a_miss(tmp_path: Path) -> None:
    """A page with the right key and other tokens, or of another namespace, is not given out; nor is it
    corrupt."""
    tier = DiskTier(tmp_path, "i", PAGE, SIZE)
    one, two = chain(1, 2), chain(2, 2)
    assert tier.append(b"", token_bytes(one), 1, [7], [memoryview(content("", one))])
    tier.refresh()
    place = tier.find(7)
    assert place is not None
    for namespace, tokens in ((b"", two), (b"x", one), (b"", one[:16]), (b"", [*one[:15], 5000, *one[16:]])):
        view = memoryview(bytearray(PAGE))
        assert tier.read([place], namespace, token_bytes(tokens), [view]) == 0
        assert bytes(view) == bytes(PAGE)
    assert tier.corrupt == 0
    assert tier.read([place], b"", token_bytes(one), [memoryview(bytearray(PAGE))]) == 1
    tier.close()


def test_a_page_that_lies_twice_is_found_where_it_is_good(tmp_path: Path) -> None:
    """Whichever of its files is damaged, and in whichever order they are read after a restart."""
    tokens = chain(1, 2)
    for damaged in range(2):
        root = tmp_path / str(damaged)
        files: list[Path] = []
        for _ in range(2):
            tier = DiskTier(root, "identity", PAGE, SIZE)
            assert store(tier, "", tokens, 0, 2)  # not refreshed: it does not know what is there
            tier.close()
            files += [path for path in sorted(root.glob("*/*.kv")) if path not in files]
        data = bytearray(files[damaged].read_bytes())
        data[-1] ^= 1
        files[damaged].write_bytes(data)
        tier = DiskTier(root, "identity", PAGE, SIZE)
        tier.refresh()
        assert fetch(tier, "", tokens) == content("", tokens)
        files[1 - damaged].unlink()
        tier.refresh()
        assert fetch(tier, "", tokens) is None
        assert fetch(tier, "", tokens[:16]) == content("", tokens[:16])
        tier.close()


def test_what_changes_while_it_is_written_is_not_stored(tmp_path: Path) -> None:
    """A run whose pages were given up meanwhile leaves nothing behind, and the next takes its place."""
    tier = DiskTier(tmp_path, "i", PAGE, SIZE)
    one = chain(1, 1)
    pages = [memoryview(content("", one))]
    assert not tier.append(b"", token_bytes(one), 0, [7], pages, lambda: False)
    tier.refresh()
    assert tier.find(7) is None
    assert store(tier, "", chain(2, 1), 0, 1)
    tier.refresh()
    assert fetch(tier, "", chain(2, 1)) == content("", chain(2, 1))
    tier.close()


def test_identities_share_room_and_nothing_else(tmp_path: Path) -> None:
    """What another model wrote is never found; when room is short the segments unused for longest go, whose
    ever they are, and what is being written stays."""
    old, new = DiskTier(tmp_path, "old", PAGE, SIZE), DiskTier(tmp_path, "new", PAGE, SIZE)
    for seed in range(200):
        store(old, "", chain(seed, 4), 0, 4)
    old.close()
    for number, path in enumerate(sorted(tmp_path.glob("old/*"))):
        os.utime(path, (number, number))
    oldest, youngest = min(tmp_path.glob("old/*")), max(tmp_path.glob("old/*"))
    for seed in range(20):
        store(new, "", chain(1000 + seed, 4), 0, 4)
    new.refresh()
    assert new.find(key_of("", chain(199, 4))) is None
    assert fetch(new, "", chain(1000, 4)) == content("", chain(1000, 4))
    assert not oldest.exists()
    assert youngest.exists()
    assert new.used_bytes() <= SIZE
    new.close()


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    """Promise: a named pipe, a folder or a dangling link by the name of a segment keeps nobody waiting, and
    nothing from being found and stored."""
    with closing(DiskTier(tmp_path, "a", PAGE, SIZE)) as tier:
        store(tier, "", chain(0, 1), 0, 1)
    os.mkfifo(tmp_path / "a" / "00000000000000ae.kv")
    (tmp_path / "a" / "00000000000000af.kv").mkdir()
    (tmp_path / "a" / "00000000000000b0.kv").symlink_to(tmp_path / "nothing")
    with closing(DiskTier(tmp_path, "a", PAGE, SIZE)) as tier:
        tier.refresh()
        assert fetch(tier, "", chain(0, 1)) == content("", chain(0, 1))
        for seed in range(1, 80):
            assert store(tier, "", chain(seed, 1), 0, 1)
        assert tier.used_bytes() <= SIZE


def test_a_size_holds_from_the_opening_on(tmp_path: Path) -> None:
    """Promise: a tier that is opened with less than is there deletes what was unused for longest, at once;
    what others write is left to them."""
    with closing(DiskTier(tmp_path, "a", PAGE, SIZE)) as tier:
        for seed in range(400):
            store(tier, "", chain(seed, 1), 0, 1)
        before = tier.used_bytes()
    assert before > SIZE // 2
    with closing(DiskTier(tmp_path, "b", PAGE, SIZE // 2)) as tier:
        assert SIZE // 4 < tier.used_bytes() <= SIZE // 2
    with closing(DiskTier(tmp_path, "a", PAGE, SIZE // 2)) as tier:
        tier.refresh()
        assert fetch(tier, "", chain(399, 1)) == content("", chain(399, 1))
        assert fetch(tier, "", chain(0, 1)) is None
        store(tier, "", chain(400, 1), 0, 1)
        with closing(DiskTier(tmp_path, "a", PAGE, 1)) as other:
            assert other.used_bytes() == tier.segment_bytes


def test_a_tier_that_others_fill_says_so(tmp_path: Path) -> None:
    """Segments that are being written are never deleted: who comes when all room is theirs gets NoRoom."""
    tiers = [DiskTier(tmp_path, "i", PAGE, SIZE) for _ in range(33)]
    for number, tier in enumerate(tiers[:-1]):
        store(tier, "", chain(number, 1), 0, 1)
    with pytest.raises(NoRoom, match="larger size"):
        store(tiers[-1], "", chain(99, 1), 0, 1)
    tiers[0].close()
    assert store(tiers[-1], "", chain(99, 1), 0, 1)
    for tier in tiers[1:]:
        tier.close()


def test_the_least_size_holds_two_pages_of_the_longest_chain(tmp_path: Path) -> None:
    """A tier of the least size that is allowed can store."""
    tier = DiskTier(tmp_path, "i", PAGE, least_disk_bytes(PAGE, 512))
    assert tier.run_pages(512) >= 2
    assert store(tier, "", chain(1, 32), 30, 2)
    tier.close()


WRITE = """
import sys
from pathlib import Path
from tests.kv.test_disk import *
tier = DiskTier(Path(sys.argv[1]), "i", PAGE, 64 * SIZE)
for seed in range(10**6):
    store(tier, "", chain(seed, 8), 0, 8)
    if seed % 50 == 20:
        print(seed, flush=True)
"""


def test_a_killed_process_leaves_a_usable_tier(tmp_path: Path) -> None:
    """SIGKILL amid writing, twice: what was stored before is there, nothing wrong is, and others go on
    writing."""
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE, str(tmp_path)], stdout=subprocess.PIPE, env={**os.environ}
        )
        assert process.stdout is not None
        said = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        tier = DiskTier(tmp_path, "i", PAGE, 64 * SIZE)
        tier.refresh()
        for seed in range(max(0, int(said) - 20), int(said) + 1):
            assert fetch(tier, "", chain(seed, 8)) == content("", chain(seed, 8))
        for seed in range(int(said), int(said) + 200):
            assert fetch(tier, "", chain(seed, 8)) in (None, content("", chain(seed, 8)))
        assert store(tier, "", chain(-1, 3), 0, 3)
        tier.close()
