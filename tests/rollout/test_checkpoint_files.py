"""What a checkpoint's file holds, and what happens if it is damaged, foreign, missing or cannot be
written."""

import os
import random
import resource
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollout.checkpoint import checkpoint_path, read_state
from rollout.data_source import EpisodeSource
from rollout.errors import CheckpointError
from rollout.turn import FinishReason, Generation, ImageChain, Prompt, Segment, StopReason, Turn
from tests.fixtures.playing import Run, playing
from tests.fixtures.rollout_args import rollout_args


@pytest.fixture
async def saved(tmp_path: Path) -> Path:
    async with playing(tmp_path, env={"max_length": 40}) as run:
        await run.batches([0])
    return checkpoint_path(str(tmp_path / "save"), 0)


async def test_a_checkpoint_cut_at_any_byte_is_refused_whole(saved: Path, tmp_path: Path) -> None:
    source = EpisodeSource(rollout_args(tmp_path, load=str(tmp_path / "save")))
    for length in reversed(range(saved.stat().st_size)):
        os.truncate(saved, length)
        with pytest.raises(CheckpointError, match="slime_verlog_0"):
            source.load(0)
        assert (source.saved_slots, source.kept, source.next_group) == ([], [], 0)


def with_pictures(folder: Path) -> Path:
    """A checkpoint whose kept turn has tensors."""
    pictured(folder).save(0)
    return checkpoint_path(str(folder / "save"), 0)


def pictured(folder: Path) -> EpisodeSource:
    """A source that keeps an episode with pictures, as a VLM's warm-up does: every prompt shows one
    more."""
    log_probs = array("f", [-0.1, -0.2])
    generation = Generation(
        [5, 6], log_probs, "ab", FinishReason.STOP, ("3",), {"id": "x"}, False, (2,)
    )
    pixels = [torch.arange(40, dtype=torch.bfloat16).reshape(4, 10) + number for number in range(3)]
    parts = [{"pixels": each, "grid": torch.tensor([[1, 2, 2]])} for each in pixels]
    images = ["first", "second", "first"]
    prompts = [Prompt([1, 2, 3], images[:n], ImageChain(parts[:n])) for n in (1, 2, 3)]
    turns = [Turn(0, i, prompts[i], generation, "a", True, "a", 1.0) for i in range(2)]
    source = EpisodeSource(rollout_args(folder))
    source.kept = [Segment("t", tuple(turns), prompts[2], StopReason.CUT)]
    return source


def test_pictures_are_restored_unchanged(tmp_path: Path) -> None:
    """Prompts share them, as they did before. Altered answers stay masked."""
    with_pictures(tmp_path)
    (kept,), (wanted,) = Run(tmp_path, load=0).source.kept, pictured(tmp_path).kept
    prompts_of = lambda segment: [*(turn.prompt for turn in segment.turns), segment.bootstrap]
    for found, truth in zip(prompts_of(kept), prompts_of(wanted), strict=True):
        assert found.image_data == truth.image_data
        assert dict(found.train_inputs).keys() == {"pixels", "grid"}
        assert all(
            torch.equal(found.train_inputs[key], truth.train_inputs[key])
            for key in found.train_inputs
        )
    first, second = (turn.prompt.train_inputs.parts[0]["pixels"] for turn in kept.turns)
    assert first is second
    without_prompts = lambda segment: [replace(turn, prompt=Prompt([])) for turn in segment.turns]
    assert without_prompts(kept) == without_prompts(wanted) and not kept.turns[0].generation.trained
    assert replace(kept, turns=(), bootstrap=None) == replace(wanted, turns=(), bootstrap=None)


@pytest.mark.parametrize("pictures", [False, True])
async def test_a_checkpoint_with_any_flipped_bit_is_refused(
    saved: Path, tmp_path: Path, pictures: bool
) -> None:
    """One bit at a time, anywhere in the file."""
    saved = with_pictures(tmp_path) if pictures else saved
    whole = saved.read_bytes()
    generator = random.Random(0)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        saved.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged|not a rollout checkpoint"):
            read_state(saved)


def test_a_missing_checkpoint_or_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = checkpoint_path(str(tmp_path), 3)
    path.parent.mkdir(parents=True)
    torch.save({"weight": torch.zeros(3)}, path)
    source = EpisodeSource(rollout_args(tmp_path, load=str(tmp_path)))
    for step, told in ((3, "not a rollout checkpoint"), (7, "--start-rollout-id 0")):
        with pytest.raises(CheckpointError, match=told):
            source.load(step)
    source.load(-1)
    source.load(None)


def test_a_disk_that_fills_up_while_writing_leaves_the_previous_checkpoint_untouched(
    tmp_path: Path,
) -> None:
    saved = with_pictures(tmp_path)
    before = saved.read_bytes()
    source = pictured(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 1, 8, 100, len(before) // 2, len(before) - 1):
        try:
            # The kernel refuses every byte beyond it.
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
            with pytest.raises(CheckpointError, match="cannot be written"):
                source.save(0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert saved.read_bytes() == before
        assert [p.name for p in saved.parent.iterdir()] == [saved.name]
    source.save(0)
