"""Demonstrations as slime's supervised data: prompts as in a rollout, with training only on the
expert's answers."""

import importlib.util
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embedded.warmstart.demonstrations import DEMONSTRATION_SEEDS
from envs.loading import load_env_module
from envs.text_game import find_action
from inspection.demonstrations import main, write_rows
from rollout.bridge.settings import load_settings
from rollout.errors import ConfigError
from rollout.tasks import make_episode, read_tasks
from rollout.tokens.encoding import DeltaEncoder
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.checkouts import slime_checkouts

CONFIGS = Path(__file__).parents[2] / "custom_configs"


def export(folder: Path, name: str, more: str = "", max_turns: int = 100) -> list[dict[str, Any]]:
    """The rows of two episodes, or of as many as `more` says."""
    config = folder / f"{name}.yaml"
    out = folder / "rows.jsonl"
    config.write_text(
        (CONFIGS / config.name).read_text(encoding="utf-8") + f"\nmax_turns: {max_turns}\n"
    )
    main(f"--config {config} --episodes 2 --out {out} --overwrite {more}".split())
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("name", "package"),
    [("babyai", "minigrid"), pytest.param("crafter", "numpy", marks=pytest.mark.slow)],
)
def test_after_random_moves_the_expert_answers_and_the_moves_are_never_trained_on(
    name: str, package: str, tmp_path: Path
) -> None:
    pytest.importorskip(package, reason=f"{name} needs pip install 'slime-verlog[envs]'")
    rows = export(tmp_path, name, "--episodes 8 --random-share 0.5", max_turns=30)
    strays = 0
    config = load_settings(SimpleNamespace(custom_config_path=str(tmp_path / f"{name}.yaml")))
    for seed in sorted({row["metadata"]["seed"] for row in rows}):
        episode = [row for row in rows if row["metadata"]["seed"] == seed]
        assert [row["metadata"]["turn"] for row in episode] == list(range(len(episode)))
        env = make_episode(config, read_tasks(config)[0], 0, seed).env
        module = load_env_module(env.env_path)
        task = SimpleNamespace(metadata=episode[0]["metadata"])
        game = module.build_env(task, SimpleNamespace(env=env.options))
        game.reset()
        for row, following in itertools.pairwise(episode):
            taught = find_action(row["messages"][-1]["content"])[0]
            assert taught == module.expert_action(game)
            shown = [m for m in following["messages"][:-1] if m["role"] == "assistant"][-1]
            played = find_action(shown["content"])[0]
            strays += played != taught
            assert shown["step_loss_mask"] == 0
            game.step(played)
    assert strays > 5


def test_demonstrated_seeds_are_neither_training_nor_evaluation_seeds(tmp_path: Path) -> None:
    pytest.importorskip("minigrid", reason="BabyAI needs pip install 'slime-verlog[envs]'")
    config = load_settings(SimpleNamespace(custom_config_path=str(CONFIGS / "babyai.yaml")))
    held_out = range(config.eval.seed_start, config.eval.seed_start + config.eval.episodes)
    drawn = []
    for seed in ("0", "5000", "-1"):
        seeds = {row["metadata"]["seed"] for row in export(tmp_path, "babyai", f"--seed {seed}")}
        assert len(seeds) == 2 and all(
            found in DEMONSTRATION_SEEDS and found not in held_out for found in seeds
        )
        drawn += sorted(seeds)
    assert len(set(drawn)) == 6


def test_demonstrations_share_no_textworld_games_with_training_or_evaluation() -> None:
    from envs.textworld import TextWorldSettings, _read_recipe

    options = TextWorldSettings(games=512)
    games = [
        {_read_recipe("coin_collector", start + k, options).key("1") for k in range(2000)}
        for start in (0, 1_000_000_000, DEMONSTRATION_SEEDS.start)
    ]
    assert [len(found) for found in games] == [512] * 3
    assert not games[2] & (games[0] | games[1])


def test_slimes_own_loss_mask_covers_exactly_the_answer_and_its_prompt_is_the_rollouts(
    tmp_path: Path,
) -> None:
    pytest.importorskip("minigrid", reason="BabyAI needs pip install 'slime-verlog[envs]'")
    checkouts = slime_checkouts()
    if not checkouts:
        pytest.skip("set SLIME_PATH to a slime checkout to compare with its loss mask")
    spec = importlib.util.spec_from_file_location(
        "slime_mask_utils", checkouts[0] / "slime/utils/mask_utils.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokenizer = chatml_tokenizer()
    generator = module.MultiTurnLossMaskGenerator(tokenizer, "qwen")
    encoder = DeltaEncoder(tokenizer)
    for row in export(tmp_path, "babyai"):
        tokens, mask = generator.get_loss_mask(row["messages"])
        *shown, answer = row["messages"]
        prompt = encoder.prompt([{k: m[k] for k in ("role", "content")} for m in shown]).token_ids
        first = mask.index(1)
        assert tokens[:first] == prompt and all(mask[first:])
        assert tokenizer.decode(tokens[first:]) == answer["content"] + "<|im_end|>\n"


def test_episodes_with_less_progression_can_be_left_out(tmp_path: Path) -> None:
    pytest.importorskip("minigrid", reason="BabyAI needs pip install 'slime-verlog[envs]'")
    rows = export(tmp_path, "babyai", "--random-share 0.3 --min-progression 1.0")
    assert all(row["metadata"]["progression"] == 1.0 for row in rows)
    with pytest.raises(SystemExit, match="error: no demonstration is left to write"):
        export(tmp_path, "babyai", "--min-progression 1.5")


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must end in .jsonl"):
        write_rows([{}], tmp_path / "rows.csv")


def test_a_file_that_exists_is_replaced_only_on_request(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text("earlier")
    command = f"--config {CONFIGS / 'sokoban.yaml'} --episodes 1 --out {out}".split()
    with pytest.raises(
        SystemExit, match="exists; give another file, or replace this one with --overwrite"
    ):
        main(command)
    assert out.read_text() == "earlier"
    main([*command, "--overwrite"])
    assert json.loads(out.read_text().splitlines()[0])["messages"]
