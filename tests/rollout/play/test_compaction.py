"""With a growing history, the model writes notes before the context is full, and the conversation
goes on from them."""

from pathlib import Path

import pytest

from rollout import fixed_turn
from rollout.bridge.sample import build_samples, row_of
from rollout.errors import FailureBudgetError
from rollout.play.conversation import Conversation
from rollout.play.memory import Compaction
from rollout.turn import StopReason
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import one_slot, playing
from tests.rollout.play.test_summary_prompts import reply
from tests.rollout.play.test_summary_turns import LONG, asked, plays, writes

FREE, CONTEXT = 200, 1024
MEMORY = {"kind": "notes", "free": FREE, "keep": 2, "times": 3, "max_tokens": 24}
COMPACTING = {"history": "full", "memory": MEMORY, "rollout_max_context_len": CONTEXT, **LONG}


def test_a_compacted_conversation_shows_task_notes_and_the_last_whole_exchanges() -> None:
    conversation = Conversation(Compaction(free=10, keep=2, times=2, max_tokens=9))
    for turn in range(4):
        conversation.show(reply(turn))
        assert not conversation.wants_notes(left=10)
        conversation.answered(reply(turn).observation, f"answer {turn}", True, "go")
    conversation.show(reply(4))
    assert conversation.wants_notes(left=9) and conversation.appends
    (request,) = conversation.show(reply(4), notes=True)
    assert (
        "Write your notes now" in request["content"] and len(conversation.messages) == 1 + 2 * 4 + 1
    )
    conversation.noted("the key is red")
    shown = conversation.show(reply(4))
    assert shown == conversation.messages
    assert [message["role"] for message in shown[1:]] == [*["user", "assistant"] * 2, "user"]
    texts = [message["content"] for message in shown[1:]]
    assert "step 0" in texts[0] and texts[0].endswith("Your notes:\nthe key is red")
    assert (
        texts[1:4:2] == ["answer 2", "answer 3"] and "step 3" in texts[2] and "step 4" in texts[4]
    )
    assert not conversation.wants_notes(left=0), "the last exchanges would be all that is left out"


async def test_an_episode_outlives_its_context_in_stretches_of_one_sample_each(
    tmp_path: Path,
) -> None:
    """In a batch, and as a whole in slime's loop."""
    async with playing(tmp_path, plays, **COMPACTING, **one_slot(60)) as run:
        batch = await fixed_turn.collect(run.args, 0, run.source)
        samples = build_samples(batch.segments, range(60), (await run.runtime()).samples)
        whole = await run.episode()
        requests = [request["input_ids"] for request in run.engine.requests]
    episode = batch.segments[0]
    assert episode.stop is StopReason.CONTEXT, "after three times, a full context ends the episode"
    prompts = [turn.prompt.token_ids for turn in episode.turns]
    notes = [number for number, turn in enumerate(episode.turns) if not turn.stepped]
    assert len(notes) == 3 and all(map(asked, (prompts[number] for number in notes)))
    assert max(map(len, prompts)) < CONTEXT
    for number in notes:
        assert (
            len(prompts[number]) > 0.7 * CONTEXT
            and len(prompts[number + 1]) < len(prompts[number]) / 2
        )
        assert chatml_tokenizer().decode(prompts[number + 1]).count("Your notes") <= 1
    rows = [row_of(sample) for sample in samples[0]]
    stretches = [row.indices for row in rows]
    assert [stretch[-1] for stretch in stretches[:3]] == notes and sum(map(len, stretches)) == len(
        prompts
    )
    assert [row.turns[-1].moves for row in rows] == [False] * 3 + [True]
    assert batch.metrics["summary/turns"] == sum(
        not turn.stepped for part in batch.segments for turn in part.turns
    )
    assert len(whole) == 4 and all(len(sample.tokens) <= CONTEXT for sample in whole)
    for sample in whole:
        start = len(sample.tokens) - sample.response_length
        assert all(sample.tokens[: start + turn.start] in requests for turn in row_of(sample).turns)


WITHOUT_FORMAT = """
from envs.base import describe_task, read_env_settings
from tests.fixtures.counting_env import CountingGame, CountingSettings

class Silent(CountingGame):
    answer_format = ""

def build_env(sample, args):
    return Silent(read_env_settings(CountingSettings, args), describe_task(sample)[1])
"""


@pytest.mark.parametrize("context", range(980, 996, 2))
async def test_notes_are_asked_for_while_the_prompt_that_asks_still_fits(
    tmp_path: Path, context: int
) -> None:
    """Where nothing but the end of the context asks for them, and turns are equally long."""
    path = tmp_path / "silent.py"
    path.write_text(WITHOUT_FORMAT)
    keys = {**COMPACTING, "memory": {**MEMORY, "free": 1}, "rollout_max_context_len": context}
    keys["rollout_interaction_env_path"] = str(path)
    async with playing(tmp_path, writes("red"), **keys, **one_slot(16)) as run:
        batch = await fixed_turn.collect(run.args, 0, run.source)
    assert batch.metrics["summary/turns"] > 0
    assert batch.metrics["rollout/faults/notes_not_asked"] == 0


async def test_a_first_prompt_that_leaves_less_than_is_to_stay_free_is_refused(
    tmp_path: Path,
) -> None:
    keys = {**COMPACTING, "memory": {**MEMORY, "free": 1000}, "max_episode_failures_per_batch": 0}
    async with playing(tmp_path, plays, **keys) as run:
        with pytest.raises(FailureBudgetError, match=r"memory\.free: 1000"):
            await run.batch()
