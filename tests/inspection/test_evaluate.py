"""`slime-verlog evaluate`: scripted players, a model's folder and an engine; tables, resumed runs,
failures."""

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from inspection.evaluate.table import sweep_points
from inspection.records import read_episodes
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.command import error_of, slime_verlog
from tests.fixtures.rollout_args import rollout_args
from tests.fixtures.scripted_engine import ScriptedEngine, draw

ROOT = Path(__file__).parents[2]
COUNTING = "tests.fixtures.counting_env"
QUICK = {"timeout_s": 60.0, "max_retries": 1, "backoff_s": 0.01, "backoff_max_s": 0.02}


def write_config(folder: Path, **keys: Any) -> list[str]:
    """The YAML and --out for the counting game, or for what `keys` say."""
    config: dict[str, Any] = {
        "rollout_interaction_env_path": COUNTING,
        "tasks": ["count", {"task": "count", "name": "short", "options": {"max_length": 2}}],
        "eval": {"episodes": 4},
        "env_backend": "inline",
        "n_env": 4,
        "engine": QUICK,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**config, **keys}))
    return [str(path), "--out", str(folder / "out")]


def evaluate(*words: str) -> int:
    return slime_verlog("evaluate", *words)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "out" / "table.json").read_text())["rows"]


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    """A scripted engine on its own event loop, because the command blocks."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    script = lambda body, number: ("ACTION: left", "ACTION: <b>dance</b>")[draw(body, 2)]
    server = ScriptedEngine(chatml_tokenizer(), script)
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    yield server
    asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def at(engine: ScriptedEngine, folder: Path) -> list[str]:
    """The options for the player behind `engine`."""
    tokenizer = rollout_args(folder).hf_checkpoint
    options = f"--player http://127.0.0.1:{engine.port} --max-response-len 32 --tokenizer"
    return [*options.split(), tokenizer]


def test_a_sweep_has_one_row_per_value_and_task(
    engine: ScriptedEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(*write_config(tmp_path), *at(engine, tmp_path), "--sweep", "memory.n=0,2") == 0
    rows = rows_of(tmp_path)
    assert [(row["setting"], row["point"], row["task"], row["n"]) for row in rows] == [
        (f"memory.n={n}", {"memory.n": n}, task, count)
        for n in (0, 2)
        for task, count in (("count", 4), ("short", 4), ("all", 8))
    ]
    for row in rows:
        assert row["success"] == {"mean": 1.0, "se": 0.0, "n": row["n"]} and row["failed"] == 0
        assert 0 < row["valid_action_ratio"]["mean"] < 1
    out = tmp_path / "out"
    printed = capsys.readouterr().out
    assert printed.count("memory.n=2") == 3 and f" view {out}\n" in printed
    assert re.match(
        r"\| setting +\| task +\| +n \| failed \| +win rate \|", (out / "table.md").read_text()
    )


def test_random_and_expert_need_no_model_and_crafters_achievements_are_in_the_table(
    tmp_path: Path,
) -> None:
    pytest.importorskip("crafter", reason="Crafter needs pip install 'slime-verlog[envs]'")
    keys = {
        "rollout_interaction_env_path": "envs.crafter",
        "tasks": ["default"],
        "eval": {"episodes": 2},
    }
    given = write_config(tmp_path, **keys, max_turns=30)
    assert evaluate(*given, "--player", "random") == 0
    (row,) = rows_of(tmp_path)
    assert row["turns"]["mean"] == 30 and row["metrics"]["achievements"]["n"] == 2
    assert {"achievements", "achievement/collect_wood"} <= row["metrics"].keys()
    heads = (tmp_path / "out" / "table.md").read_text().splitlines()[0]
    assert "achievements" in heads and "collect_wood" not in heads


def test_a_models_folder_is_served_here_and_repeats_with_its_seed(
    tmp_path: Path, tiny: Path
) -> None:
    given = write_config(tmp_path, eval={"episodes": 3}, tasks=["count"])
    tables = []
    for name in ("a", "b"):
        out = tmp_path / name
        words = ["--player", str(tiny), "--max-response-len", "8", "--out", str(out)]
        assert evaluate(*given, *words) == 0
        tables.append((out / "table.md").read_text())
        tables.append(
            sorted(str([turn["response"] for turn in e["story"]]) for e in read_episodes(out))
        )
    assert tables[:2] == tables[2:] and "Player tiny" in tables[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model that speaks the counting game's words."""
    from embedded.warmstart.policy import PolicySize, build_policy, save_policy, train_tokenizer

    texts = ["seed 5 count 1 path left\nleft 4", "ACTION: left", "ACTION: right"] * 4
    tokenizer = train_tokenizer(texts, ["Current Observation:\n"])
    size = PolicySize(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, context=512)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_policy(build_policy(tokenizer, size, seed=1), tokenizer, folder)
    return folder


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_models_folder_that_was_copied_in_part_is_one_sentence(
    tmp_path: Path, tiny: Path, name: str
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "tiny")
    (folder / name).write_bytes((folder / name).read_bytes()[:-20])
    said = error_of("evaluate", *write_config(tmp_path), "--player", folder)
    assert f"'{folder}' cannot be loaded: " in said


def test_a_prompt_over_the_models_context_ends_its_episode_and_is_counted(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write_config(
        tmp_path, tasks=["count"], history="full", env={"length_of": f"{COUNTING}.always_long"}
    )
    words = ["--player", str(tiny), "--max-response-len", "16", "--episodes", "2"]
    assert evaluate(*given, *words) == 0
    (row,) = rows_of(tmp_path)
    assert (row["n"], row["failed"], row["context"]) == (2, 0, 2)
    assert "2 episodes ended because the next prompt was too long" in capsys.readouterr().out


def test_a_faulty_environment_fails_the_command_and_is_counted_apart_from_the_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {"raise_at": 0, "raise_seeds": [1_000_000_002]}
    given = [*write_config(tmp_path, tasks=["count"], env=broken, n_env=1), "--player", "random"]
    assert evaluate(*given) == 1
    (row,) = rows_of(tmp_path)
    assert (row["n"], row["failed"], row["success"]["mean"]) == (3, 1, 1.0)
    shown = capsys.readouterr()
    fault = "task count, seed 1000000002: step raised RuntimeError: the game broke"
    assert f"the first fault: {fault}" in shown.err and "counting_env.py:" in shown.err
    assert (
        "error: 1 of 4 episodes failed" in shown.err
        and "--allow-failures 1 accepts them" in shown.err
    )
    assert (
        "1 failed episodes (environment lost, or prompt refused) are not part of the means"
        in shown.out
    )
    assert evaluate(*given, "--allow-failures", "1") == 0
    assert len(list(read_episodes(tmp_path / "out"))) == 4, (
        "the failed episode was played again, in its own place"
    )


def test_a_run_whose_first_episodes_all_fail_ends_early(tmp_path: Path) -> None:
    broken = {"raise_at": 0, "raise_seeds": list(range(1_000_000_000, 1_000_000_040))}
    given = write_config(tmp_path, tasks=["count"], env=broken, n_env=1, eval={"episodes": 40})
    said = error_of("evaluate", *given, "--player", "random")
    assert "the first 8 episodes all failed; the last: task count, seed 1000000007" in said
    assert rows_of(tmp_path)[0]["failed"] == 8


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            "--player expertt",
            "random, expert, a model's folder or an address, got 'expertt'; did you mean expert",
        ),
        ("--player http://127.0.0.1:1", "give --tokenizer FOLDER with the model's tokenizer"),
        ("--player http://127.0.0.1:1/v1", "give --model NAME"),
        (
            "--player http://127.0.0.1:1 --tokenizer {folder}/model",
            "no engine answers at http://127.0.0.1:1",
        ),
        (
            "--player http://127.0.0.1:1/v1 --model x",
            "no engine answers at http://127.0.0.1:1/v1/models",
        ),
        ("--player {folder}", "is not a Hugging Face folder: it has no config.json"),
        ("--player expert", f"{COUNTING} has no function expert_action"),
        ("--sweep memory.n", "--sweep must look like memory.n=1,2,4, got 'memory.n'"),
        ("--sweep memory.n=1,1", "--sweep has memory.n=1 twice"),
        ("--sweep memory.n=1,x", "memory.n must be an integer, got 'x'"),
        ("--sweep memory.n=[1", "is not valid YAML"),
        ("--sweep memory.n=1 --sweep memory.n=2", "--sweep memory.n is given twice"),
        ("--sweep memory.n=1 --set memory.n=2", "memory.n is given by --set and by --sweep"),
        ("--episodes 0", "--episodes must be at least 1, got 0"),
    ],
)
def test_a_wrong_argument_is_one_sentence(tmp_path: Path, extra: str, words: str) -> None:
    rollout_args(tmp_path)
    given = write_config(tmp_path)
    options = f"--player random {extra}".format(folder=tmp_path).split()
    said = error_of("evaluate", *given, *options)
    assert words in said and not list((tmp_path / "out").glob("*.jsonl"))


def test_a_sweep_takes_every_combination_and_values_with_commas() -> None:
    assert sweep_points(["a=1,2", "b=[x, y],null"]) == [
        {"a": 1, "b": ["x", "y"]},
        {"a": 1, "b": None},
        {"a": 2, "b": ["x", "y"]},
        {"a": 2, "b": None},
    ]
