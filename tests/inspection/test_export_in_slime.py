"""slime's own reader and loss mask over the rows that `slime-verlog export` writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.tokens.encoding import DeltaEncoder
from tests.fixtures.chatml import chatml_tokenizer
from tests.fixtures.checkouts import slime_checkouts
from tests.fixtures.played_episodes import invented_episode, write_run
from tests.inspection.test_export import conversation_episode, export, rows

SUPERVISED = """
import json, sys
from argparse import Namespace
from slime.rollout import sft_rollout
from slime.utils.data import Dataset

class Buffer:
    def get_samples(self, count):
        return [[sample] for sample in Dataset(sys.argv[1], None, None, None, prompt_key="messages", tool_key="tools")]

args = Namespace(hf_checkpoint=sys.argv[2], loss_mask_type="qwen", rollout_batch_size=4, rollout_global_dataset=True)
samples = sft_rollout.generate_rollout(args, 0, Buffer())
print(json.dumps([[sample.tokens, sample.loss_mask] for (sample,) in samples]))
"""


def test_slime_reads_the_rows_and_trains_on_the_models_answers_alone(tmp_path: Path) -> None:
    """slime's own reader and supervised rollout; the prompts' tokens equal those of our
    rollouts."""
    pytest.importorskip("pyarrow", reason="slime's reader needs pyarrow")
    checkouts = slime_checkouts()
    if not checkouts:
        pytest.skip("set SLIME_PATH to a slime checkout to read the rows with its code")
    tool = {
        "type": "function",
        "function": {"name": "look", "description": "Look.", "parameters": {}},
    }
    write_run(tmp_path, [invented_episode(1, tools=[tool]), conversation_episode(2)])
    out = tmp_path / "rows.jsonl"
    tokenizer = chatml_tokenizer()
    assert export(tmp_path, out, "--valid-only") == 0
    tokenizer.save_pretrained(str(tmp_path / "model"))
    command = [sys.executable, "-W", "ignore", "-c", SUPERVISED, str(out), str(tmp_path / "model")]
    environment = {**os.environ, "PYTHONPATH": str(checkouts[0])}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read = json.loads(done.stdout.splitlines()[-1])
    assert len(read) == 4
    for row, (tokens, mask) in zip(rows(out), read, strict=True):
        masked = len(tokens) - len(mask)
        trained = [token for token, wanted in zip(tokens[masked:], mask, strict=True) if wanted]
        answers = [
            m["content"]
            for m in row["messages"]
            if m["role"] == "assistant" and m["step_loss_mask"]
        ]
        assert tokenizer.decode(trained) == "".join(f"{answer}<|im_end|>\n" for answer in answers)
        first = next(
            place for place, message in enumerate(row["messages"]) if message["role"] == "assistant"
        )
        prompt = [
            {key: message[key] for key in ("role", "content")}
            for message in row["messages"][:first]
        ]
        encoder = DeltaEncoder(tokenizer, tools=json.loads(row["tools"]))
        assert tokens[:masked] == list(encoder.prompt(prompt).token_ids)
