"""Episodes played without a tokenizer: the same prompts as in a rollout, recorded as JSON."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inspection.evaluate.playing import play_text_episode, scripted
from inspection.export.rows import rows_of
from inspection.records import append_episode
from inspection.report.reading import read_run
from inspection.view.page import Packer
from rollout.bridge.settings import load_settings
from rollout.tasks import make_episode, read_tasks
from rollout.workers.pool import EnvPool

COUNT = """
from envs.base import BaseInteractionEnv

class Count(BaseInteractionEnv):
    instruction_prompt, actions, default_action = "Say up three times.", ("up", "down"), "down"

    def __init__(self):
        self.level = 0

    def _show(self):
        return {"obs_str": str(self.level), "text": {"long_term_context": str(self.level), "short_term_context": ""}}

    def reset(self):
        self.level = 0
        return self._show()

    def step(self, response_text):
        up = response_text == "up"
        self.level += up
        over = self.level == 3
        return self._show(), over, {
            "reward": float(over), "terminated": over, "truncated": False, "valid_action": up,
            "executed_action": "up" if up else "down", "progression": float(over),
        }

def build_env(sample, args):
    return Count()
"""
EXPERT = "\ndef expert_action(env):\n    return 'up'\n"


def play(player: str, **keys: Any) -> dict[str, Any]:
    settings = load_settings(SimpleNamespace(env_backend="inline", **keys))
    spec = make_episode(settings, read_tasks(settings)[0], 0, 5)

    async def run() -> dict[str, Any]:
        pool = EnvPool(settings)
        try:
            return await play_text_episode(pool, settings, spec, scripted(player))
        finally:
            pool.close()

    return asyncio.run(run())


def count(folder: Path, code: str, player: str, **keys: Any) -> dict[str, Any]:
    (folder / "count.py").write_text(code)
    return play(
        player, rollout_interaction_env_path=str(folder / "count.py"), tasks=["count"], **keys
    )


@pytest.mark.parametrize("history", ["window", "full"])
def test_an_expert_plays_to_the_end_and_every_message_is_stored_once(
    tmp_path: Path, history: str
) -> None:
    facts = count(tmp_path, COUNT + EXPERT, "expert", history=history)
    assert (facts["stop"], facts["turns"], facts["return"], facts["success"]) == (
        "terminated",
        3,
        1.0,
        True,
    )
    shown = [facts["messages"][index] for index in facts["story"][2]["prompt"]]
    assert shown[0] == {"role": "system", "content": "Say up three times."}
    assert shown[-1]["content"].endswith("2")
    texts = [json.dumps(message) for message in facts["messages"]]
    assert len(set(texts)) == len(texts)


def test_a_game_without_any_limit_ends_at_the_default_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.workers.pool.DEFAULT_MAX_TURNS", 4)
    endless = COUNT.replace("self.level == 3", "False")
    assert count(tmp_path, endless, "random")["turns"] == 4
    limited = COUNT.replace("self.level == 3", "self.level == 9").replace(
        "    def reset", "    max_steps = 9\n\n    def reset"
    )
    assert count(tmp_path, limited + EXPERT, "expert")["turns"] == 9


def test_notes_are_turns_of_the_record_that_the_environment_never_saw(tmp_path: Path) -> None:
    keys = {"rollout_interaction_env_path": "envs.recall", "tasks": ["recall"]}
    memory = {"kind": "notes", "every": 4, "keep": 0, "max_tokens": 8}
    episode = play("expert", **keys, env={"max_steps": 12, "ask_every": 6}, memory=memory)
    wrote = ["summary" in turn for turn in episode["story"]]
    assert [k for k, is_notes in enumerate(wrote) if is_notes] == [4, 9] and len(wrote) == 14
    assert (
        episode["turns"] == 12 and episode["valid_action_ratio"] == 1.0 and episode["return"] == 2.0
    )
    assert episode["metrics"]["facts_kept"] == 1.0, "a column of evaluations"
    notes = episode["story"][4]
    assert notes["notes"] in ("red", "green", "blue", "yellow") and notes["executed_action"] == ""
    assert notes["summary"] == {"facts_kept": 1.0, "facts_kept_1": 1.0}
    question = [episode["messages"][k]["content"] for k in episode["story"][12]["prompt"]]
    assert f"Your notes:\n{notes['notes']}\n" in question[-1] and len(question) == 6

    rows = list(rows_of(episode))
    assert [row["metadata"]["notes"] for row in rows] == wrote
    assert rows[4]["messages"][-1]["content"] == notes["notes"]
    append_episode(tmp_path / "episodes.jsonl", episode, "expert")
    (read,) = read_run(tmp_path)
    assert len(read.turns) == sum(turn.valid for turn in read.turns) == 12
    packer = Packer()
    packer.add(episode)
    assert packer.rows[0]["turns"] == 12 and packer.rows[0]["valid"] == 1
