"""Notes in separate turns, in every rollout: counted, trained and saved, and never seen by the
environment."""

from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from advantage.turn_table import decode_row
from rollout import fixed_turn
from rollout.bridge.checks import check_generate
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.sample import row_of
from rollout.bridge.settings import load_settings
from rollout.errors import ConfigError
from rollout.play.notes import measure_notes
from rollout.preflight import first_prompt_check
from rollout.samples import convert_samples_to_train_data
from rollout.tasks import try_each_task
from rollout.turn import FinishReason, Generation, Prompt
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.playing import (
    both_loops,
    flat,
    one_slot,
    place_of,
    play_saved,
    turns_of,
    warnings_with,
)
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import draw

NOTES = {"kind": "notes", "every": 4, "budget": 2000, "keep": 1, "max_tokens": 24}
LONG = {"env": {"max_length": 200}, "seed_start": 7}
RESPONSES = ("THINK: so.\nACTION: left", "ACTION: right", "ACTION: dance")
WRITTEN = ("the key is red", "", "<|im_start|>ACTION: left", "went right")


def asked(prompt: Any) -> bool:
    """Whether a prompt, as text, ids or request, asks for notes."""
    ids = prompt["input_ids"] if isinstance(prompt, dict) else prompt
    return "Write your notes now" in (
        ids if isinstance(ids, str) else chatml_tokenizer().decode(ids)
    )


def plays(body: dict[str, Any], number: int) -> str:
    texts = WRITTEN if asked(body) else RESPONSES
    return texts[draw(body, len(texts))]


def writes(notes: Any) -> Any:
    """A script whose notes are always these."""
    return lambda body, number: notes if asked(body) else RESPONSES[0]


async def play(
    folder: Path, first: int, last: int, collect: Any = fixed_turn.collect, **keys: Any
) -> Any:
    """The outputs and requests of `play_saved` with notes."""
    return await play_saved(
        folder, first, last, collect, **{"script": plays, "memory": NOTES, **LONG, **keys}
    )


@pytest.mark.parametrize(("budget", "summaries"), [(25, 5), (24, 4)])
async def test_a_summary_takes_one_turn_of_the_batch_that_moves_nothing_and_has_no_anchor(
    tmp_path: Path, budget: int, summaries: int
) -> None:
    ((output,), requests) = await play(tmp_path, 0, 1, **one_slot(budget))
    metrics = output.metrics
    assert [asked(body) for body in requests] == [k % 5 == 4 for k in range(budget)]
    longest = [body["sampling_params"]["max_new_tokens"] for body in requests]
    assert longest == [24 if asked(body) else 32 for body in requests]
    assert metrics["rollout/turns"] == budget and metrics["summary/turns"] == summaries
    bootstrap = flat(output)[-1]
    assert bootstrap.metadata["kind"] == "bootstrap" and asked(bootstrap.tokens[:-1]) == (
        budget == 24
    )
    played = [s.metadata for s in turns_of(output) if "summary" not in s.metadata]
    assert len(played) == 20
    assert metrics["turn/valid_action_ratio"] == sum(facts["valid_action"] for facts in played) / 20
    assert metrics["turn/reward"] == pytest.approx(sum(facts["reward"] for facts in played) / 20)
    one_gpu = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 1}
    data = convert_samples_to_train_data(rollout_args(tmp_path, **one_gpu), output.samples)
    for sample, vector in zip(flat(output), data["prompt"], strict=True):
        facts = sample.metadata
        for span in decode_row(vector).turns:
            assert span.moves == ("summary" not in facts) == (span.anchor >= 0)
            if not span.moves:
                assert (span.reward, span.action_start, facts["action"]) == (0.0, -1, None)
                assert not facts["terminated"] and not facts["truncated"]


@both_loops
async def test_batches_measure_the_notes_and_later_prompts_show_them(
    tmp_path: Path, collect: Any
) -> None:
    outputs, _ = await play(tmp_path, 0, 3, collect)
    notes: dict[int, tuple[int, str]] = {}
    for output in outputs:
        summaries = [s for s in turns_of(output) if "summary" in s.metadata]
        texts = [s.response.removesuffix("<|im_end|>") for s in summaries]
        measured = {
            "empty": mean(not text.strip() for text in texts),
            "action_lines": mean("ACTION:" in text for text in texts),
            "control_tokens": mean("<|im_start|>" in text for text in texts),
            "tokens": mean(sample.response_length for sample in summaries),
            "cut": 0.0,
        }
        assert {name: output.metrics[f"summary/{name}"] for name in measured} == pytest.approx(
            measured
        )
        assert not [name for name in output.metrics if name.startswith("turn/notes_")]
        for sample in turns_of(output):
            episode, turn = place_of(sample)
            prompt = chatml_tokenizer().decode(sample.tokens[: -sample.response_length])
            last, text = notes.get(episode, (-1, ""))
            if turn > last >= 0 and text:
                assert f"Your notes:\n{text}\n" in prompt
            if "summary" in sample.metadata:
                notes[episode] = turn, sample.metadata["notes"]
    assert len({text for _, text in notes.values()}) > 1


@pytest.mark.parametrize(
    ("written", "copied"), [([1, 2, 3, 4, 5, 9], 2 / 3), ([4, 5, 6, 9], 0.0), ([1, 2, 3], None)]
)
def test_copied_is_the_share_of_four_tokens_in_a_row_that_the_prompt_showed(
    written: list[int], copied: float | None
) -> None:
    end, prompt = 7, Prompt([1, 2, 3, 4, 5, 6, 8])
    generation = Generation([*written, end], [0.0] * (len(written) + 1), "notes", FinishReason.STOP)
    found = measure_notes(generation, "notes", prompt, (end,), (end,))
    assert found.get("copied") == copied and found["tokens"] == len(written) + 1


async def test_summaries_do_not_count_towards_max_turns_or_the_episodes_turns(
    tmp_path: Path,
) -> None:
    outputs, requests = await play(tmp_path, 0, 2, max_turns=8, **one_slot(18))
    # After the eighth turn of an episode nothing is noted: it is over.
    assert [asked(body) for body in requests] == [k % 9 == 4 for k in range(36)]
    assert all(output.metrics["episode/turns"] == 8 for output in outputs)
    assert outputs[0].metrics["rollout/stop/max_turns"] == 2


async def test_control_tokens_in_notes_stay_text(tmp_path: Path) -> None:
    memory, written = {**NOTES, "every": 1, "keep": 0}, "<|im_start|><|vision_start|>x"
    _, requests = await play(tmp_path, 0, 1, script=writes(written), memory=memory, **one_slot(4))
    plain, _, noted = (body["input_ids"] for body in requests[:3])
    start = chatml_tokenizer().convert_tokens_to_ids("<|im_start|>")
    assert f"Your notes:\n{written}" in chatml_tokenizer().decode(noted)
    assert noted.count(start) == plain.count(start)


COMPACTION = {"kind": "notes", "free": 550, "keep": 1, "times": 3, "max_tokens": 24}
RESUMED: dict[str, dict[str, Any]] = {
    "window": {"env": {"max_length": 12}, "memory": {**NOTES, "every": 2}},
    "compaction": {
        "history": "full",
        "samples": "turns",
        "rollout_max_context_len": 1024,
        "memory": COMPACTION,
    },
}


@both_loops
@pytest.mark.parametrize("kind", RESUMED)
async def test_a_run_resumed_after_any_turn_sends_the_prompts_of_an_unbroken_run(
    tmp_path: Path, kind: str, collect: Any
) -> None:
    turns = 14

    async def played(first: int, last: int) -> list[list[int]]:
        outputs, _ = await play(tmp_path, first, last, collect, **RESUMED[kind], **one_slot(1))
        return [sample.tokens for sample in turns_of(*outputs)]

    whole = await played(0, turns)
    assert (2 if kind == "window" else 1) <= sum(map(asked, whole)) <= turns // 2
    for turn in range(1, turns):
        assert await played(turn, turn + 1) == whole[turn : turn + 1]


async def test_turns_that_a_checkpoint_keeps_keep_their_notes(tmp_path: Path) -> None:
    keys = {"critic_warmup": {"w_epoch": 1, "w_iter": 1}, "num_critic_only_steps": 2}
    (_, whole), _ = await play(tmp_path, 0, 2, **keys)
    (resumed,), _ = await play(tmp_path, 1, 2, **keys)
    notes = lambda output: [
        (s.metadata.get("summary"), s.metadata.get("notes")) for s in turns_of(output)
    ]
    assert notes(resumed) == notes(whole) and any(summary for summary, _ in notes(resumed))
    moves = [row_of(sample).turns[0].moves for sample in turns_of(resumed)]
    assert moves == [summary is None for summary, _ in notes(resumed)]


async def test_a_live_episode_is_given_up_if_the_memory_now_notes_at_other_turns(
    tmp_path: Path,
) -> None:
    await play(tmp_path, 0, 1, **one_slot(7))
    for memory, lost in ((NOTES, 0.0), ({"kind": "window"}, 1.0), ({**NOTES, "every": 3}, 1.0)):
        ((output,), _) = await play(tmp_path, 1, 2, **one_slot(7), memory=memory)
        assert output.metrics["rollout/faults/episodes_lost_at_resume"] == lost


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"memory": {**NOTES, "n": 2}}, "memory.n: 2 .* memory.keep"),
        ({"memory": {**NOTES, "max_tokens": 33}}, "memory.max_tokens: 33"),
        ({"memory": {**NOTES, "keep": 0}, "history": "full"}, "memory.keep: 0"),
        (
            {"memory": NOTES, "history": "full", "rollout_max_context_len": None},
            "--rollout-max-context-len",
        ),
    ],
)
def test_budgets_that_cannot_work_are_refused(
    tmp_path: Path, keys: dict[str, Any], told: str
) -> None:
    args = rollout_args(tmp_path, **keys)
    with pytest.raises(ConfigError, match=told):
        check_generate(args, load_settings(args))


async def test_notes_whose_prompt_does_not_fit_are_counted_and_the_episode_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = {**NOTES, "every": 1, "keep": 0}
    ((whole,), requests) = await play(tmp_path, 0, 1, memory=memory, **one_slot(4))
    lengths = [len(body["input_ids"]) for body in requests]
    assert lengths[1] > max(lengths[0], lengths[2]) + 20, (
        "the request for notes is longer than that for an action"
    )
    assert whole.metrics["rollout/faults/notes_not_asked"] == 0
    limit = lengths[1] - 1
    for number in range(2):  # a replay counts nothing again
        keys = {**one_slot(4), "rollout_max_prompt_len": limit}
        ((output,), requests) = await play(tmp_path, number, number + 1, memory=memory, **keys)
        assert not any(map(asked, requests))
        assert output.metrics["rollout/faults/notes_not_asked"] == 4
    warning, _ = warnings_with("asks for notes", caplog)
    assert "does not fit" in warning and "memory.budget" in warning


@pytest.mark.parametrize(
    ("kind", "budget", "context", "told"),
    [
        ("notes", 9, None, r"task 'count' has \d+ tokens, above memory.budget: 9"),
        ("notes", 2000, 40, r"has \d+ tokens; with --rollout-max-response-len 32"),
        ("inline_notes", 9, 40, r"has \d+ tokens; with --rollout-max-response-len 32"),
        ("notes", 2000, None, None),
        ("inline_notes", 9, None, None),
    ],
)
def test_preflight_refuses_a_budget_or_context_below_the_first_prompt_of_a_task(
    tmp_path: Path, kind: str, budget: int, context: int | None, told: str | None
) -> None:
    args = rollout_args(
        tmp_path, memory={**NOTES, "budget": budget, "kind": kind}, rollout_max_context_len=context
    )
    settings = load_settings(args)
    look = first_prompt_check(settings, RolloutFlags.read(args))
    if told is None:
        try_each_task(settings, look)
        return
    with pytest.raises(ConfigError, match=told):
        try_each_task(settings, look)
