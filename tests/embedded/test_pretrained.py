"""A model that exists, trained in place of the quickstart's own: shapes, files and refusals; not
whether it learns."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("megatron.core", reason="needs pip install 'slime-verlog[embedded]'")
pytest.importorskip("minigrid", reason="needs pip install 'slime-verlog[envs]'")
pytest.importorskip("matplotlib", reason="needs pip install 'slime-verlog[embedded]'")

from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from embedded.quickstart import main
from embedded.run.record import read_rows
from embedded.studies.run import main as run_study
from embedded.trainer.megatron import build_model, initialize, predict
from embedded.warmstart.policy import save_policy
from tests.cases import some
from tests.embedded.conftest import SHAPE

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")

FLAGS = (
    "rollout_batch_size=8",
    "global_batch_size=4",
    "rollout_max_response_len=6",
    "rollout_max_context_len=1024",
)
TRIAL = ("--updates", "2", "--episodes", "2", *(f"--set-flag={flag}" for flag in FLAGS))


@pytest.fixture
def llama(tmp_path: Path, tokenizer: Any) -> Path:
    """SmolLM2's shape, made small: Llama with grouped queries, its head tied to the embeddings."""
    end = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        **{**SHAPE, "max_position_embeddings": 2048}, tie_word_embeddings=True, **end
    )
    torch.manual_seed(0)
    save_policy(LlamaForCausalLM(config).bfloat16(), tokenizer, tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("demonstrations", some(["0", "1"], ["1"]))
def test_a_tied_llama_trains_and_stays_as_it_was(
    llama: Path, tmp_path: Path, demonstrations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = (llama / "model.safetensors").read_bytes()
    out = tmp_path / "out"
    flags = ["--model", str(llama), "--out", str(out), "--set", "max_turns=3", *TRIAL]
    main([*flags, "--demonstrations", demonstrations])
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["updates"], summary["turns"], summary["win_rate_after"]["n"]) == (2, 16, 2)
    assert summary["device"] == "CPU"
    assert (llama / "model.safetensors").read_bytes() == before
    if demonstrations == "1":
        learned, given = (
            load_file(out / "policy_before" / "model.safetensors"),
            load_file(llama / "model.safetensors"),
        )
        assert set(learned) == set(given)
        assert not torch.equal(learned["model.norm.weight"], given["model.norm.weight"].float())


@pytest.mark.slow
def test_a_study_starts_from_a_model_and_computes_in_bfloat16(llama: Path, tmp_path: Path) -> None:
    flags = {"bf16": True, "use_rollout_logprobs": True, "num_critic_only_steps": 0}
    flags |= {"rollout_batch_size": 8, "global_batch_size": 4}
    warm = {"model": str(llama), "bf16": True, "episodes": 1, "epochs": 1}
    shared = {
        "question": "Which?",
        "seeds": [0],
        "updates": 2,
        "eval_episodes": 2,
        "flags": flags,
        "warm": warm,
    }
    keys = {"env": {"max_steps": 3}, "n_env": 4, "memory": {"n": 0}}
    path = tmp_path / "study.yaml"
    path.write_text(
        yaml.safe_dump(
            {**shared, "keys": keys, "variants": {"v": {"flags": {"num_critic_only_steps": 0}}}}
        )
    )
    run_study([str(path), "--out", str(tmp_path), "--keep-policies"])
    run = tmp_path / "study" / "v" / "seed_0"
    assert (
        load_file(run / "policy_after" / "model.safetensors").keys()
        == load_file(llama / "model.safetensors").keys()
    )
    gaps = [
        r["actor/train_rollout_logprob_abs_diff"]
        for r in read_rows(run / "rows.jsonl")
        if "rollout/turns" in r
    ]
    assert len(gaps) == 2 and 0 < max(gaps) < 0.02  # float32 agrees to 1e-5
    ids, at = torch.arange(20)[None], (torch.zeros(20, dtype=torch.long), torch.arange(20))
    with torch.no_grad():
        half, full = (
            predict(build_model(llama, initialize(), bf16=bf16), ids, *at) for bf16 in (True, False)
        )
    assert 0 < (half - full).abs().max() < 0.1 and half.dtype == torch.float32
