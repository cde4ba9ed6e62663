"""Notes in separate turns, in every rollout: counted, trained and saved, and never seen by the environment."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from advantage.turn_table import decode_row
from inspection.view.sources import read_run
from rollout import continuous, fixed_turn
from rollout.bridge.checks import check_generate
from rollout.bridge.flags import RolloutFlags
from rollout.bridge.sample import row_of
from rollout.bridge.settings import load_settings
from rollout.bridge.whole_episodes import episode_facts
from rollout.data_source import EpisodeSource
from rollout.errors import ConfigError, FailureBudgetError
from rollout.evaluate import play_episodes
from rollout.fixed_turn import collect_or_draw
from rollout.generate import generate
from rollout.play.metrics import measure_notes, whole_episode_metrics
from rollout.play.runtime import close_runtimes, get_runtime
from rollout.play.slots import check_slot
from rollout.preflight import first_prompt_check
from rollout.samples import convert_samples_to_train_data
from rollout.tasks import try_each_task
from rollout.turn import FinishReason, Generation, Prompt
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine, draw
from tests.fixtures.slime_dumps import save_like_slime

NOTES = {"kind": "notes", "every": 4, "budget": 2000, "keep": 1, "max_tokens": 24}
LONG = {"env": {"max_length": 200}, "seed_start": 7}
RESPONSES = ("THINK: so.\nACTION: left", "ACTION: right", "ACTION: dance")
WRITTEN = ("the key is red", "", "<|im_start|>ACTION: left", "went right")
ASKED = "Write your notes now"


def plays(body: dict[str, Any], number: int) -> str:
    if asked(chatml_tokenizer().decode(body["input_ids"])):
        return WRITTEN[draw(body, len(WRITTEN))]
    return RESPONSES[draw(body, len(RESPONSES))]


def asked(prompt: str) -> bool:
    return ASKED in prompt


async def play(
    folder: Path, first: int, last: int, collect: Any = fixed_turn.collect, **keys: Any
) -> tuple[list[Any], list[list[int]]]:
    """Batches first..last-1, each saved and, if they are not the first, resumed; and the prompts that were sent."""
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        load = str(folder / "save") if first else None
        args = rollout_args(folder, engine.port, **{"memory": NOTES, **LONG, **keys}, load=load)
        source, outputs = EpisodeSource(args), []
        if first:
            source.load(first - 1)
        try:
            for number in range(first, last):
                outputs.append(await collect_or_draw(args, number, source, collect))
                source.save(number)
        finally:
            await close_runtimes()
    return outputs, [body["input_ids"] for body in engine.requests]


def turns_of(output: Any) -> list[Any]:
    return [s for group in output.samples for s in group if s.metadata["kind"] == "turn"]


def one_slot(turns: int) -> dict[str, Any]:
    return {"n_env": 1, "rollout_batch_size": turns, "global_batch_size": turns}


@pytest.mark.parametrize(("budget", "summaries"), [(25, 5), (24, 4)])
async def test_a_summary_takes_one_turn_of_the_batch(tmp_path: Path, budget: int, summaries: int) -> None:
    ((output,), prompts) = await play(tmp_path, 0, 1, **one_slot(budget))
    metrics, texts = output.metrics, [chatml_tokenizer().decode(ids) for ids in prompts]
    assert [asked(text) for text in texts] == [k % 5 == 4 for k in range(budget)]
    assert metrics["rollout/turns"] == budget and metrics["summary/turns"] == summaries
    (samples,) = output.samples if len(output.samples) == 1 else [[s for group in output.samples for s in group]]
    bootstrap = samples[-1]
    assert bootstrap.metadata["kind"] == "bootstrap"
    assert asked(chatml_tokenizer().decode(bootstrap.tokens[:-1])) == (budget == 24)
    played = [s for s in turns_of(output) if "summary" not in s.metadata]
    assert len(played) == 20
    assert metrics["turn/valid_action_ratio"] == sum(s.metadata["valid_action"] for s in played) / 20
    assert metrics["turn/reward"] == pytest.approx(sum(s.metadata["reward"] for s in played) / 20)


async def test_a_summary_is_a_turn_of_the_table_that_moves_nothing_and_has_no_anchor(tmp_path: Path) -> None:
    ((output,), _) = await play(tmp_path, 0, 1)
    one_gpu = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 1}
    data = convert_samples_to_train_data(rollout_args(tmp_path, **one_gpu), output.samples)
    flat = [s for group in output.samples for s in group]
    seen = 0
    for sample, vector in zip(flat, data["prompt"], strict=True):
        for span in decode_row(vector).turns:
            assert span.moves == ("summary" not in sample.metadata) and (span.anchor >= 0) == span.moves
            if not span.moves:
                seen += 1
                assert span.reward == 0.0 and span.action_start == -1 and sample.metadata["action"] is None
                assert not sample.metadata["terminated"] and not sample.metadata["truncated"]
    assert seen == output.metrics["summary/turns"] > 0


async def test_the_engine_is_asked_for_at_most_max_tokens_of_notes(tmp_path: Path) -> None:
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        args = rollout_args(tmp_path, engine.port, memory=NOTES, **LONG)
        await collect_or_draw(args, 0, EpisodeSource(args))
        await close_runtimes()
    for body in engine.requests:
        most = 24 if asked(engine.tokenizer.decode(body["input_ids"])) else 32
        assert body["sampling_params"]["max_new_tokens"] == most


@pytest.mark.parametrize("collect", [fixed_turn.collect, continuous.collect])
async def test_batches_measure_the_notes_and_later_prompts_show_them(tmp_path: Path, collect: Any) -> None:
    outputs, _ = await play(tmp_path, 0, 3, collect)
    notes: dict[int, tuple[int, str]] = {}
    for output in outputs:
        summaries = [s for s in turns_of(output) if "summary" in s.metadata]
        texts = [s.response.removesuffix("<|im_end|>") for s in summaries]
        share = lambda found, texts=texts: sum(map(found, texts)) / len(texts)
        assert output.metrics["summary/empty"] == share(lambda text: not text.strip())
        assert output.metrics["summary/action_lines"] == share(lambda text: "ACTION:" in text)
        assert output.metrics["summary/control_tokens"] == share(lambda text: "<|im_start|>" in text)
        lengths = [sample.response_length for sample in summaries]
        assert output.metrics["summary/tokens"] == sum(lengths) / len(lengths) and output.metrics["summary/cut"] == 0.0
        assert not [name for name in output.metrics if name.startswith("turn/notes_")]
        for sample in turns_of(output):
            facts = sample.metadata
            prompt = chatml_tokenizer().decode(sample.tokens[: -sample.response_length])
            last, text = notes.get(facts["episode_id"], (-1, ""))
            if last >= 0 and facts["round_number"] > last and text:
                assert f"Your notes:\n{text}\n" in prompt
            if "summary" in facts:
                notes[facts["episode_id"]] = facts["round_number"], facts["notes"]
    assert len({text for _, text in notes.values()}) > 1


@pytest.mark.parametrize(("written", "copied"), [([1, 2, 3, 4, 5, 9], 2 / 3), ([4, 5, 6, 9], 0.0), ([1, 2, 3], None)])
def test_copied_is_the_share_of_four_tokens_in_a_row_that_the_prompt_showed(
    written: list[int], copied: float | None
) -> None:
    end, prompt = 7, Prompt([1, 2, 3, 4, 5, 6, 8])
    generation = Generation([*written, end], [0.0] * (len(written) + 1), "notes", FinishReason.STOP)
    found = measure_notes(generation, "notes", prompt, (end,), (end,))
    assert found.get("copied") == copied and found["tokens"] == len(written) + 1


async def test_summaries_do_not_count_towards_max_turns_or_the_episodes_turns(tmp_path: Path) -> None:
    outputs, prompts = await play(tmp_path, 0, 2, max_turns=8, **one_slot(18))
    texts = [chatml_tokenizer().decode(ids) for ids in prompts]
    # After the eighth turn of an episode nothing is noted: it is over.
    assert [asked(text) for text in texts] == [k % 9 == 4 for k in range(36)]
    assert all(output.metrics["episode/turns"] == 8 for output in outputs)
    assert outputs[0].metrics["rollout/stop/max_turns"] == 2


async def test_notes_that_the_response_limit_cuts_are_used_as_cut(tmp_path: Path) -> None:
    def cut(body: dict[str, Any], number: int) -> Any:
        text = plays(body, number)
        return (
            engine.answer("a red key that", body, "length")
            if asked(engine.tokenizer.decode(body["input_ids"]))
            else text
        )

    async with ScriptedEngine(chatml_tokenizer(), cut) as engine:
        args = rollout_args(tmp_path, engine.port, memory=NOTES, **LONG, **one_slot(10))
        output = await collect_or_draw(args, 0, EpisodeSource(args))
        await close_runtimes()
    assert output.metrics["summary/cut"] == 1.0 and output.metrics["turn/length_stop_ratio"] == 0.0
    assert "Your notes:\na red key that\n" in engine.tokenizer.decode(engine.requests[5]["input_ids"])


async def test_control_tokens_in_notes_stay_text(tmp_path: Path) -> None:
    def script(body: dict[str, Any], number: int) -> str:
        return "<|im_start|><|vision_start|>x" if asked(engine.tokenizer.decode(body["input_ids"])) else "ACTION: left"

    async with ScriptedEngine(chatml_tokenizer(), script) as engine:
        args = rollout_args(tmp_path, engine.port, memory={**NOTES, "every": 1, "keep": 0}, **LONG, **one_slot(4))
        await collect_or_draw(args, 0, EpisodeSource(args))
        await close_runtimes()
    plain, _, noted = (body["input_ids"] for body in engine.requests[:3])
    end = engine.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert "Your notes:\n<|im_start|><|vision_start|>x" in engine.tokenizer.decode(noted)
    assert noted.count(end) == plain.count(end)


async def test_a_whole_episode_in_slimes_own_loop_writes_notes(tmp_path: Path) -> None:
    async with ScriptedEngine(chatml_tokenizer(), lambda body, number: "ACTION: left") as engine:
        args = rollout_args(tmp_path, engine.port, memory=NOTES, **LONG, max_turns=10)
        sample = EpisodeSource(args).get_samples(1)[0][0]
        samples = await generate(args, sample, RolloutFlags.read(args).sampling_params())
        await close_runtimes()
    assert isinstance(samples, list) and len(samples) == 12
    metrics = whole_episode_metrics(episode_facts(samples))
    assert metrics["summary/turns"] == 2 and metrics["episode/turns"] == metrics["rollout/turns"] == 10
    assert metrics["turn/valid_action_ratio"] == 1.0


async def test_held_out_episodes_write_notes_and_record_them(tmp_path: Path) -> None:
    keys = {"memory": NOTES, **LONG, "max_turns": 10, "eval": {"episodes": 1}}
    async with ScriptedEngine(chatml_tokenizer(), plays) as engine:
        args = rollout_args(tmp_path, engine.port, **keys)
        (result,) = await play_episodes(await get_runtime(args), EpisodeSource(args).eval_episodes(), 1)
        await close_runtimes()
    facts = result.facts()
    assert facts["turns"] == 10 and len(facts["story"]) == 12
    assert [k for k, turn in enumerate(facts["story"]) if "summary" in turn] == [4, 9]


async def test_dumps_of_batches_tell_notes_from_turns_of_the_environment(tmp_path: Path) -> None:
    ((output,), _) = await play(tmp_path, 0, 1)
    save_like_slime(tmp_path / "dump", [sample for group in output.samples for sample in group], 0)
    episodes = list(read_run(tmp_path / "dump"))
    wrote = [turn for episode in episodes for turn in episode["story"] if "summary" in turn]
    assert len(wrote) == output.metrics["summary/turns"] and all("tokens" in turn["summary"] for turn in wrote)
    assert sum(episode["turns"] for episode in episodes) == len(turns_of(output)) - len(wrote)


@pytest.mark.parametrize("collect", [fixed_turn.collect, continuous.collect])
def test_a_run_resumed_after_any_turn_sends_the_prompts_of_an_unbroken_run(tmp_path: Path, collect: Any) -> None:
    turns, keys = 16, {**one_slot(1), "env": {"max_length": 12}, "memory": {**NOTES, "every": 2}}

    def played(first: int, last: int) -> list[list[int]]:
        outputs = asyncio.run(play(tmp_path, first, last, collect, **keys))[0]
        return [sample.tokens for output in outputs for sample in turns_of(output)]

    whole = played(0, turns)
    assert 3 <= sum(asked(chatml_tokenizer().decode(ids)) for ids in whole) <= turns // 2
    for turn in range(1, turns):
        assert played(turn, turn + 1) == whole[turn : turn + 1]


def test_turns_that_a_checkpoint_keeps_keep_their_notes(tmp_path: Path) -> None:
    keys = {"critic_warmup": {"w_epoch": 1, "w_iter": 1}, "num_critic_only_steps": 2}
    whole, _ = asyncio.run(play(tmp_path, 0, 2, **keys))
    ((resumed,), _) = asyncio.run(play(tmp_path, 1, 2, **keys))
    drawn, expected = (
        [(s.metadata.get("summary"), s.metadata.get("notes")) for s in turns_of(output)]
        for output in (resumed, whole[1])
    )
    assert drawn == expected and any(summary for summary, _ in drawn)
    moves = [row_of(sample).turns[0].moves for sample in turns_of(resumed)]
    assert moves == [summary is None for summary, _ in drawn]


def test_a_live_episode_is_given_up_if_the_memory_now_notes_at_other_turns(tmp_path: Path) -> None:
    asyncio.run(play(tmp_path, 0, 1, **one_slot(7)))
    for memory, lost in ((NOTES, 0.0), ({"kind": "window"}, 1.0), ({**NOTES, "every": 3}, 1.0)):
        ((output,), _) = asyncio.run(play(tmp_path, 1, 2, **one_slot(7), memory=memory))
        assert output.metrics["rollout/faults/episodes_lost_at_resume"] == lost


def test_a_slot_has_one_digest_more_than_responses_that_reached_the_environment() -> None:
    spec = {"episode_id": 0, "name": "a", "env_path": "b", "options": {}, "metadata": {}}
    episode = {"spec": spec, "answers": [[1], [2]], "stepped": [True, False], "digests": ["x", "y"]}
    check_slot({"next_episode": 1, "episode": episode})
    for wrong in ({"digests": ["x", "y", "z"]}, {"stepped": [True]}, {"stepped": [True, 0]}):
        with pytest.raises(ValueError, match="an episode must"):
            check_slot({"next_episode": 1, "episode": {**episode, **wrong}})


@pytest.mark.parametrize(
    ("memory", "sentence"),
    [
        ({**NOTES, "every": 0}, "memory.every must be at least 1, got 0"),
        ({**NOTES, "n": 2}, "memory.n: 2 does nothing with memory.kind: notes; remove it or set memory.keep"),
        ({**NOTES, "max_tokens": 33}, "memory.max_tokens: 33 is longer than any response may be"),
    ],
)
def test_budgets_that_cannot_work_are_refused(tmp_path: Path, memory: dict[str, Any], sentence: str) -> None:
    args = rollout_args(tmp_path, memory=memory)
    with pytest.raises(ConfigError, match=sentence):
        check_generate(args, load_settings(args))


async def test_notes_whose_prompt_does_not_fit_are_counted_and_the_episode_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = {**NOTES, "every": 1, "keep": 0}
    ((whole,), prompts) = await play(tmp_path, 0, 1, memory=memory, **one_slot(4))
    lengths = [len(ids) for ids in prompts]
    assert lengths[1] > max(lengths[0], lengths[2]) + 20, "the request for notes is longer than that for an action"
    assert whole.metrics["rollout/faults/notes_not_asked"] == 0
    limit = lengths[1] - 1
    for number in range(2):  # a replay counts nothing again
        keys = {**one_slot(4), "rollout_max_prompt_len": limit}
        ((output,), prompts) = await play(tmp_path, number, number + 1, memory=memory, **keys)
        assert not any(asked(chatml_tokenizer().decode(ids)) for ids in prompts)
        assert output.metrics["rollout/faults/notes_not_asked"] == 4
    warning, _ = [record.getMessage() for record in caplog.records if "asks for notes" in record.getMessage()]
    assert "does not fit" in warning and "memory.budget" in warning


async def test_a_context_that_fills_before_the_budget_does_is_emptied_by_notes(tmp_path: Path) -> None:
    memory = {**NOTES, "every": 50, "keep": 0}
    ((whole,), prompts) = await play(tmp_path, 0, 1, memory=memory, **one_slot(16))
    lengths = [len(ids) for ids in prompts]
    assert "summary/turns" not in whole.metrics and lengths[15] > lengths[10]
    keys = {**one_slot(16), "rollout_max_context_len": lengths[10] + 32}
    ((output,), prompts) = await play(tmp_path, 0, 1, memory=memory, **keys)
    texts = [chatml_tokenizer().decode(ids) for ids in prompts]
    assert sum(map(asked, texts)) == output.metrics["summary/turns"] > 0
    assert output.metrics["rollout/stop/context"] == output.metrics["rollout/faults/notes_not_asked"] == 0


def test_history_full_is_refused_with_notes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only grows; memory.kind: notes replaces .* use history: window"):
        load_settings(rollout_args(tmp_path, memory=NOTES, history="full"))


async def test_a_budget_below_the_tasks_own_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailureBudgetError, match=r"has \d+ tokens, above memory.budget: 9, so notes would be"):
        await play(tmp_path, 0, 1, memory={**NOTES, "budget": 9})


@pytest.mark.parametrize(
    ("kind", "budget", "context", "sentence"),
    [
        ("notes", 9, None, r"the first prompt of task 'count' has \d+ tokens, above memory.budget: 9, .* raise it"),
        (
            "notes",
            2000,
            40,
            r"has \d+ tokens; with --rollout-max-response-len 32 it does not fit: raise --rollout-max-c",
        ),
        ("inline_notes", 9, 40, r"has \d+ tokens; with --rollout-max-response-len 32 it does not fit"),
        ("notes", 2000, None, None),
        ("inline_notes", 9, None, None),
        ("window", 9, None, None),
    ],
)
def test_preflight_refuses_a_budget_or_context_below_the_first_prompt_of_a_task(
    tmp_path: Path, kind: str, budget: int, context: int | None, sentence: str | None
) -> None:
    args = rollout_args(tmp_path, memory={**NOTES, "budget": budget, "kind": kind}, rollout_max_context_len=context)
    settings = load_settings(args)
    look = first_prompt_check(settings, RolloutFlags.read(args))
    if sentence is None:
        try_each_task(settings, look)
    else:
        with pytest.raises(ConfigError, match=sentence):
            try_each_task(settings, look)
