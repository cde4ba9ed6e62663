"""`slime-verlog train`: what it leaves behind in environments with and without an expert, and what
it refuses."""

import contextlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import embedded.launch
from embedded.arguments import build_args, with_absolute_files
from embedded.warmstart.policy import PolicySize
from inspection.records import read_episodes
from inspection.view.training import read_training
from tests.fixtures.command import error_of, slime_verlog
from tests.fixtures.warm_python import warm_engines
from tests.inspection.view.pages import head_of

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

ROOT = Path(__file__).parents[2]
ISLAND = {
    "rollout_interaction_env_path": "tests.fixtures.island",
    "tasks": ["island"],
    "eval": {"episodes": 3},
    "n_env": 4,
    "env_backend": "inline",
}
FAST = {
    **{"episodes": 6, "least_steps": 80, "lr": 1e-2, "batch_size": 8},
    "size": PolicySize(layers=1, hidden=32, heads=2, kv_heads=2, ffn=64),
}
SMALL = "--set-flag rollout_batch_size=16 --set-flag global_batch_size=8"


@pytest.fixture(autouse=True)
def _warm_engines() -> Iterator[None]:
    with warm_engines():
        yield


@pytest.fixture(autouse=True)
def short_imitation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny policy that imitates few steps."""
    monkeypatch.setattr(embedded.launch, "IMITATION", FAST)


def train(folder: Path, flags: str = "", of: Callable[..., Any] = slime_verlog, **keys: Any) -> Any:
    """Run the command into `folder / out` with these keys of the YAML; returns its exit code."""
    path = folder / "island.yaml"
    path.write_text(yaml.safe_dump({**ISLAND, **keys}))
    return of("train", path, "--out", folder / "out", *f"{SMALL} {flags}".split())


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run of three updates, and what it printed."""
    folder = tmp_path_factory.mktemp("played")
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, warm_engines(), contextlib.redirect_stdout(printed):
        patch.setattr(embedded.launch, "IMITATION", FAST)
        assert train(folder, "--updates 3 --episodes 2 --seed 4") == 0
    return folder / "out", printed.getvalue()


def test_without_an_expert_it_trains_from_random_play_and_keeps_everything(
    played: tuple[Path, str],
) -> None:
    out, text = played
    assert (
        "tests.fixtures.island has no expert_action(env), so the policy imitates random actions"
        in text
    )
    assert text.index("warning: only 2 of 3 updates train the policy") < text.index(
        "before: win rate"
    )
    assert "verdict: 2 held-out episodes are too few to tell: " in text
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["updates"], summary["actor_updates"], summary["seed"]) == (3, 2, 4)
    assert (
        summary["win_rate_after"]["n"] == 2
        and summary["fault"] is None
        and summary["best_update"] in (0, 3)
    )
    for command in (
        "evaluate ",
        f"view {out}",
        f"compare {out} {out} --settings 'update 0' 'update 3'",
    ):
        assert command in text
    weights = {
        n: load_file(out / f"policy_{n}" / "model.safetensors") for n in ("before", "after", "best")
    }
    assert any(
        not torch.equal(weights["before"][k], weights["after"][k]) for k in weights["before"]
    )
    same = weights["before" if summary["best_update"] == 0 else "after"]
    assert all(torch.equal(weights["best"][k], same[k]) for k in same)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [0, 1, 2, 3, 3] and rows[0]["eval/episodes"] == 2
    assert not list(out.glob(".*"))


@pytest.mark.slow
def test_group_estimator_alone_trains_without_a_critic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"group_estimator": "rloo", "critic_warmup": {"w_epoch": 2}}
    out = tmp_path / "out"
    few = "--updates 1 --episodes 2 --set-flag rollout_batch_size=2 --set-flag global_batch_size=4"
    assert train(tmp_path, few, **keys) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["updates"], summary["actor_updates"]) == (1, 1)
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[1])
    assert row["episode/finished"] == 8 and not any(name.startswith("critic/") for name in row)
    assert "critic_warmup of the YAML is left out" not in capsys.readouterr().out


def test_the_page_of_a_run_shows_episodes_and_trained_turns(played: tuple[Path, str]) -> None:
    out, _ = played
    assert slime_verlog("view", out, "--worlds", 0) == 0
    shown = head_of(out / "episodes.html")["episodes"]
    assert {"policy", "training"} == {episode["player"] for episode in shown}


def test_the_episodes_are_records_and_the_policies_load_with_transformers(
    played: tuple[Path, str],
) -> None:
    out, _ = played
    episodes = list(read_episodes(out))
    assert Counter(e["setting"] for e in episodes) == {"update 0": 2, "update 3": 2}
    first = episodes[0]
    assert (first["env_path"], first["seed"], first["player"]) == (
        "tests.fixtures.island",
        1_000_000_000,
        "policy",
    )
    tokenizer = AutoTokenizer.from_pretrained(out / "policy_after")
    model = AutoModelForCausalLM.from_pretrained(out / "policy_after")
    prompt = [first["messages"][i] for i in first["story"][0]["prompt"]]
    ids = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert tokenizer.decode(
        model.generate(**ids, max_new_tokens=2, do_sample=False)[0, -2:]
    ).startswith("THINK")


@pytest.mark.slow
def test_an_expert_is_imitated_and_a_clusters_warmup_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("minigrid", reason="needs pip install 'slime-verlog[envs]'")
    sets = "--set env.max_steps=5 --set n_env=4 --set env_backend=inline"
    flags = f"--updates 1 --episodes 2 {sets} --seeds 0 1"
    config = ROOT / "custom_configs" / "babyai.yaml"
    assert (
        slime_verlog("train", config, "--out", tmp_path / "out", *f"{SMALL} {flags}".split()) == 0
    )
    text = capsys.readouterr().out
    assert (
        "critic_warmup of the YAML is left out" in text
        and "seed 1: imitating scripted play" in text
    )
    assert "| seed | win rate before |" in text
    written = yaml.safe_load((tmp_path / "out" / "seed_1" / "config.yaml").read_text())
    assert "critic_warmup" not in written and written["env"]["max_steps"] == 5


def test_the_runs_yaml_names_files_by_their_absolute_paths() -> None:
    keys = {
        "memory": {"kind": "mine.py:last"},
        "env": {"path": "x.py"},
        "tasks": [{"env": "# x.py"}],
    }
    keys = with_absolute_files(keys)
    assert (
        keys["memory"]["kind"] == f"{Path.cwd()}/mine.py:last"
        and keys["tasks"][0]["env"] == f"{Path.cwd()}/# x.py"
    )
    assert keys["env"] == {"path": "x.py"}, "the environment's options are its own"
    assert with_absolute_files({"env": {"prices": {1: 0.5}}}) == {"env": {"prices": {1: 0.5}}}, (
        "keys keep their types"
    )


def test_a_run_whose_actor_never_trained_says_so_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert train(tmp_path, "--updates 1 --set-flag num_critic_only_steps=1") == 1
    sentence = "the actor never trained: only the critic did, in all 1 updates"
    assert f"error: {sentence}" in capsys.readouterr().out
    assert json.loads((out / "summary.json").read_text())["fault"].startswith(sentence)


REFUSED = {
    "free text": (
        {"env": {"free_text": True}},
        "takes free text (its actions are empty) and has no expert_action(env)",
    ),
    "pictures": ({"env": {"pictures": True}}, "the prompts have images"),
    "rejected answers": ({"env": {"deaf": True}}, "demonstrated answers, such as 'THINK: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    keys, sentence = REFUSED[case]
    assert sentence in train(tmp_path, of=error_of, **keys)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--set-flag lrr=1", "unknown key '--set-flag lrr'; did you mean '--set-flag lr'?"),
        ("--set-flag save=elsewhere", "checkpoints are in "),
        (
            "--set lr=1e-4",
            "'lr' is one of slime's own flags and no key of the YAML; give --set-flag lr=VALUE",
        ),
        ("--set-flag rollout_batch_size=15", "not a multiple of --global-batch-size 8"),
        ("--updates 0", "num_rollout must be at least 1, got 0"),
        ("--seeds 1 2 1", "--seeds names a seed twice"),
        (
            "--set-flag rollout_function_path=rollout.fixed_turns.generate_rollout",
            "rollout_function_path",
        ),
    ],
    ids=str,
)
def test_a_wrong_flag_is_refused_before_anything_is_written(
    flags: str, sentence: str, tmp_path: Path
) -> None:
    assert sentence in train(tmp_path, flags, of=error_of)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_is_kept_unless_it_is_to_be_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert train(tmp_path, "--updates 1") == 0
    before = contents(out)
    error = train(tmp_path, "--updates 1", of=error_of)
    assert "holds a finished run, and nothing was changed: --resume continues it" in error
    error = train(tmp_path, "--updates 2 --resume", of=error_of)
    assert "holds a run with other settings: flags.num_rollout is 1 there and 2 here" in error
    monkeypatch.setattr(
        "embedded.training_run.train", lambda *_: pytest.fail("a finished run was run again")
    )
    capsys.readouterr()
    assert train(tmp_path, "--updates 1 --resume --set rollout_processes=2") == 0
    assert "holds this run, finished" in (text := capsys.readouterr().out)
    assert "after:  win rate" in text and f"view {out}" in text
    assert contents(out) == before


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in the folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_seeds_of_several_starts_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    few = "--updates 1 --episodes 1 --seeds"
    assert train(tmp_path, f"{few} 0") == 0
    first = contents(out / "seed_0")
    assert "seed_0 holds a finished run" in train(tmp_path, f"{few} 1 0", of=error_of)
    assert not (out / "seed_1").exists()
    assert train(tmp_path, f"{few} 1") == 0
    assert [summary["seed"] for summary in json.loads((out / "seeds.json").read_text())] == [0, 1]
    assert contents(out / "seed_0") == first


def test_a_failed_held_out_episode_is_named_and_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {"max_length": 4, "raise_at": 0, "raise_seeds": [1_000_000_001]}
    path = "tests.fixtures.counting_env"
    keys = {"rollout_interaction_env_path": path, "env": env, "max_env_retries_per_turn": 0}
    assert train(tmp_path, "--updates 2", **keys) == 1
    text = capsys.readouterr().out
    assert "error: 2 held-out episodes failed; the first: " in text
    assert "the game broke" in text


@pytest.mark.parametrize(
    ("memory", "flags", "sentence"),
    [
        ({"max_tokens": 41}, "", "memory.max_tokens: 41 is longer than any response may be"),
        ({"budget": 1}, "", "above memory.budget: 1, "),
        ({}, "--set-flag rollout_max_context_len=45", "it does not fit: raise "),
    ],
)
def test_notes_that_cannot_work_are_refused_before_imitation(
    tmp_path: Path, memory: dict[str, Any], flags: str, sentence: str
) -> None:
    keys = {
        "rollout_interaction_env_path": "envs.recall",
        "env": {"max_steps": 8, "ask_every": 4},
        "tasks": ["recall"],
        "memory": {"kind": "notes", "max_tokens": 8, **memory},
    }
    assert sentence in train(tmp_path, f"--updates 2 {flags}", of=error_of, **keys)
    assert not (tmp_path / "out" / "policy_before").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--set-flag rollout_batch_size=50", "a batch holds 50 turns"),
        (
            "--set group_estimator=gigpo --set-flag rollout_batch_size=5",
            "20 episodes per batch .* do not fill optimizer steps of global_batch_size 24",
        ),
        ("--set preset=sao --set-flag eps_clip_c=3.0", "policy_loss: dis has no dual clip"),
        (
            "--set value_pretraining.batches=1 --set n_env=12 --set group_estimator=grpo "
            "--set-flag rollout_batch_size=6",
            "value_pretraining trains a critic, but group_estimator: grpo has none",
        ),
        (
            "--set value_pretraining.batches=1 --set n_env=12 --set-flag num_critic_only_steps=1",
            "num_critic_only_steps: value_pretraining trains the critic that PPO starts from",
        ),
    ],
)
def test_flags_that_the_first_update_refuses_are_refused_before_imitation(
    tmp_path: Path, flags: str, sentence: str
) -> None:
    given = f"--updates 2 --set-flag global_batch_size=24 {flags}"
    assert re.search(sentence, train(tmp_path, given, of=error_of))
    assert not (tmp_path / "out").exists()


def test_a_preset_sets_the_flags_of_its_loss_unless_they_are_given() -> None:
    keys = {"rollout_interaction_env_path": "envs.babyai", "preset": "sao"}
    args = build_args(keys, hf_checkpoint="", eps_clip_high=3.0)
    found = args.use_rollout_logprobs, args.eps_clip, args.eps_clip_high, args.eps_clip_c
    assert found == (True, 0.3, 3.0, None)


def test_a_run_that_breaks_says_so_in_its_folder_and_on_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {"length_of": "tests.fixtures.counting_env.always_long", "raise_at": 1}
    env["raise_seeds"] = [*range(40), *range(1_000_000_000, 1_000_000_003)]
    limits = {"max_turns": 6, "max_env_retries_per_turn": 0, "max_episode_failures_per_batch": 0}
    path = "tests.fixtures.counting_env"
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match="error: ") as caught:
        train(tmp_path, "--updates 2", rollout_interaction_env_path=path, env=env, **limits)
    assert "after 0 updates: 3 of 3 held-out episodes failed\n" in capsys.readouterr().out
    stopped = json.loads((out / "about.json").read_text())["stopped"]
    assert str(caught.value) == f"error: {stopped}", stopped
    training = read_training(out, "out")
    assert (
        training is not None
        and training["state"] == f"stopped: {stopped}"
        and not training["healthy"]
    )
