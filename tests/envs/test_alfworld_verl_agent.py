"""ALFWorld by verl-agent's protocol; with VERL_AGENT_CHECKOUT, compared with verl-agent's own code."""

import ast
import importlib.util
import os
import random
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envs.alfworld import FAMILIES
from envs.alfworld.verl_agent import PROMPTS, load_templates, write_prompt

TEMPLATES = '''
ALFWORLD_TEMPLATE_NO_HIS = """See {current_observation}. Do one of {admissible_actions}."""
ALFWORLD_TEMPLATE = """{task_description}|{step_count}|{history_length}|{action_history}|{current_step}|"""\\
    """{current_observation}|{admissible_actions}"""
'''


def write_checkout(folder: Path, text: str = TEMPLATES) -> Path:
    path = folder / PROMPTS
    path.parent.mkdir(parents=True)
    path.write_text("import a_package_that_nobody_has\n" + text)
    return folder


def test_a_first_prompt_has_no_past_and_help_is_not_listed(tmp_path: Path) -> None:
    templates = load_templates(write_checkout(tmp_path))
    assert write_prompt(templates, [], "a room", ["help", "look", "wait"]) == "See a room. Do one of 'look'\n 'wait'."


GOOD = "<think>so</think><action> Go To Desk 1 </action>"
ANSWERS = {
    GOOD: ("go to desk 1", True),
    GOOD + "<action>look</action>": ("go to desk 1", True),
    GOOD.upper(): ("go to desk 1", False),
    GOOD.replace("<think>", ""): ("go to desk 1", False),
    GOOD.replace("so", "\u4e00"): ("go to desk 1", False),
    "</action>" + GOOD: ("", True),
    "x" * 40: ("x" * 30, False),
    "": ("", False),
}


@pytest.fixture
def rooms() -> Any:
    pytest.importorskip("alfworld", reason="ALFWorld: pip install 'slime-verlog[alfworld]' enables this test")
    pytest.importorskip("fast_downward", reason="ALFWorld needs 'slime-verlog[alfworld]', planner and all")
    from tests.fixtures import alfworld_rooms

    return alfworld_rooms


def write_data(rooms: Any, folder: Path) -> Path:
    """A split `valid_seen` with two games of each family, one of the first family unsolvable."""
    for number in range(2):
        for family in FAMILIES:
            game = {**rooms.make_game(family, number), "solvable": (family, number) != (FAMILIES[0], 1)}
            rooms.write_game(folder, "valid_seen", f"{family}-Mug-None-Desk-{number}", game)
    for game in folder.rglob("game.tw-pddl"):
        game.with_name("traj_data.json").write_text(f'{{"task_type": "{game.parts[-3].partition("-")[0]}"}}')
    return folder


def build(rooms: Any, data: Path, checkout: Path, seed: int, task: str = "all", **options: Any) -> Any:
    env = {"preset": "verl_agent", "verl_agent": str(checkout), "data_path": str(data), "split": "valid_seen"}
    sample = SimpleNamespace(metadata={"task": task, "seed": seed})
    return rooms.build_env(sample, SimpleNamespace(env={**env, **options}))


def test_the_expert_wins_ten_and_the_last_step_names_the_family(rooms: Any, tmp_path: Path) -> None:
    data, checkout = write_data(rooms, tmp_path / "data"), write_checkout(tmp_path / "checkout")
    env = build(rooms, data, checkout, 1000, "look")
    observation = env.reset()
    assert env.whole_prompts and env.format_observation(observation)["content"].startswith("See -= Welcome")
    rewards, done, info = [], False, {}
    while not done:
        observation, done, info = env.step(rooms.expert_action(env))
        rewards.append(info["reward"])
        assert info["valid_action"] and info["executed_action"] in env.format_observation(observation)["content"]
    assert rewards == [0.0] * (len(rewards) - 1) + [10.0]
    assert info["metrics"] == {"success/look_at_obj_in_light": 1.0} and info["terminated"]


def test_an_answer_in_bad_form_is_charged_and_still_played(rooms: Any, tmp_path: Path) -> None:
    data, checkout = write_data(rooms, tmp_path / "data"), write_checkout(tmp_path / "checkout")
    env = build(rooms, data, checkout, 1000, max_steps=3)
    env.reset()
    observation, _, info = env.step("<action>inventory</action>")
    assert (info["valid_action"], info["reward"], info["executed_action"]) == (False, -0.1, "inventory")
    assert "carrying" in observation["obs_str"]
    observation, _, info = env.step("<think></think><action>fly</action>")
    assert (info["valid_action"], info["reward"], observation["obs_str"]) == (True, 0.0, "Nothing happens.")
    _, done, info = env.step("look")
    assert (done, info["truncated"], info["action"], list(info["metrics"].values())) == (True, True, None, [0.0])


# From here on: verl-agent's own code.


@pytest.fixture(scope="module")
def checkout() -> Path:
    folder = os.environ.get("VERL_AGENT_CHECKOUT")
    if not folder:
        pytest.skip("set VERL_AGENT_CHECKOUT to a checkout of verl-agent to compare with its code")
    return Path(folder)


def theirs(checkout: Path, file: str, *names: str, **known: Any) -> dict[str, Any]:
    """Run the named functions and classes of a file of the checkout, without the file's imports."""
    tree = ast.parse((checkout / "agent_system" / file).read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    exec(compile(tree, file, "exec"), known)
    return known


TAGS = ["</action>", "<action>", "<THINK>", "</think>"]
WORDS = [*TAGS, "go to desk 1", "LOOK", "fly", "\u4e01", "\u0130", "\n", "\u03a3"]
THOUGHTS = ["<think>so</think>", "<think>so</think>\n", "<think>so", "so</think>", "<think>\u6211</think>"]


def random_answer(rng: random.Random, commands: list[str]) -> str:
    command = rng.choice([*commands, *WORDS, ""])
    action = rng.choice(["<action>{}</action>", "<action> {}\n</action>", "<ACTION>{}</Action>", "{}", "<action>{}"])
    thought = rng.choice(THOUGHTS)
    noise = "".join(rng.choices(WORDS, k=rng.choice([0, 0, 0, 2, 5])))
    return rng.choice(["{0}{1}{2}", "{2}{0}{1}", "{1}{0}", "{0}{1}"]).format(thought, action.format(command), noise)


class Workers:
    """verl-agent's `AlfworldEnvs` without Ray, with one worker."""

    def __init__(self, code: dict[str, Any], base: Any, seed: int) -> None:
        self._code, self._worker = code, code["AlfworldWorker"]({}, seed, base)

    def reset(self) -> Any:
        obs, infos = self._worker.reset()
        return self._show(obs, infos)

    def _show(self, obs: Any, infos: Any) -> Any:
        self.info = {key: value[0] for key, value in infos.items()}
        self.get_admissible_commands = [self.info["admissible_commands"]]
        return list(obs), None, [self.info]

    def step(self, actions: list[str]) -> Any:
        obs, _, dones, infos = self._worker.step(actions[0])
        texts, images, infos = self._show(obs, infos)
        return texts, images, [self._code["compute_reward"](self.info)], [dones[0]], infos


def load_manager(checkout: Path) -> tuple[Any, Any, dict[str, Any]]:
    """verl-agent's environment manager, its loader of games, and its worker."""
    import typing

    import numpy as np

    hints = {name: getattr(typing, name) for name in ("List", "Dict", "Any", "Tuple", "Union")}
    torch = SimpleNamespace(Tensor=type(None))
    base = theirs(checkout, "environments/base.py", "to_numpy", "EnvironmentManagerBase", np=np, torch=torch, **hints)
    base["defaultdict"] = defaultdict
    memory = theirs(checkout, "memory/memory.py", "SimpleMemory", BaseMemory=object, **hints)
    package = "environments/env_package/alfworld"
    project = theirs(checkout, f"{package}/projection.py", "alfworld_projection", re=re, **hints)["alfworld_projection"]
    worker = theirs(checkout, f"{package}/envs.py", "AlfworldWorker", "compute_reward")
    known = {**base, **load_templates(checkout), "SimpleMemory": memory["SimpleMemory"]}
    names = ("AlfWorldEnvironmentManager", "parse_gamefile", "set_gamefile")
    manager = theirs(checkout, "environments/env_manager.py", *names, **known)["AlfWorldEnvironmentManager"]
    config = SimpleNamespace(env=SimpleNamespace(history_length=2))
    file = checkout / "agent_system" / package / "alfworld/agents/environment/alfred_tw_env.py"
    spec = importlib.util.spec_from_file_location("verl_agent_alfred_tw_env", file)
    assert spec is not None and spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loader
    spec.loader.exec_module(loader)
    return lambda envs: manager(envs, project, config), loader.AlfredTWEnv, worker


@pytest.mark.slow
def test_prompts_rewards_and_games_are_those_of_verl_agent(checkout: Path, rooms: Any, tmp_path: Path) -> None:
    import yaml

    make_manager, loader, worker = load_manager(checkout)
    file = checkout / "agent_system/environments/env_package/alfworld/configs/config_tw.yaml"
    config = yaml.safe_load(file.read_text())
    data = write_data(rooms, tmp_path / "data")
    config["dataset"]["eval_id_data_path"] = str(data / "json_2.1.1" / "valid_seen")
    base = loader(config, train_eval="eval_in_distribution")
    rng, turns, played, won = random.Random(1), 0, set(), 0
    for seed in range(1000, 1024):
        manager, env = make_manager(Workers(worker, base, seed)), build(rooms, data, checkout, seed)
        seen, infos = manager.reset({})
        observation, done, returned, info = env.reset(), False, 0.0, {}
        family = next(family for family in FAMILIES if f"/{family}-" in infos[0]["extra.gamefile"])
        played.add(infos[0]["extra.gamefile"])
        while not done:
            assert env.format_observation(observation) == {"role": "user", "content": seen["text"][0]}
            answer = random_answer(rng, env._now.commands)
            if rng.random() < seed % 3 / 2:
                answer = rooms.expert_action(env)
            seen, rewards, dones, infos = manager.step([answer])
            observation, done, info = env.step(answer)
            penalty = 0.1 * (1 - int(infos[0]["is_action_valid"]))
            assert info["reward"] == rewards[0] - penalty and info["valid_action"] == bool(infos[0]["is_action_valid"])
            assert done == dones[0] and info["terminated"] == bool(infos[0]["won"])
            turns, returned = turns + 1, returned + rewards[0]
        batch = {"total_batch_list": [[{"active_masks": True}]], "total_infos": [infos]}
        rates = manager.success_evaluator(**batch)
        name = family.removesuffix("_simple")
        assert info["metrics"] == {f"success/{family}": rates[f"{name}_success_rate"][0]}
        assert rates["success_rate"][0] == returned / 10 == info["progression"]
        won += int(info["progression"])
        env.close()
    print(f"{turns} turns, {len(played)} games, {won} won")
    assert turns > 300 and len(played) > 6 and 3 < won < 24
