"""Runs an agent against slime's own OpenAI adapter and prints how many of the generated tokens are
trained.

    python agent_adapter.py COMMAND...        in a Python that runs slime, with slime on PYTHONPATH

The tokenizer has one token per character. The engine's answers differ and have eight tokens each.
"""

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

from slime.agent.adapters import common
from slime.agent.adapters.openai import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.trajectory import TurnRecord
from slime.utils.types import Sample

SESSION = "session-1"
generated: list[list[int]] = []


class Characters:
    """One token per character."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        text = "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
        return [ord(character) for character in text + "<assistant>"]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


async def answer(prompt_ids: list[int], *_: Any, **__: Any) -> TurnRecord:
    ids = [ord(character) for character in f"answer {len(generated)}"]
    generated.append(ids)
    return TurnRecord(
        prompt_ids=list(prompt_ids),
        output_ids=ids,
        finish_reason="stop",
        output_log_probs=[-1.0] * 8,
    )


def main(command: list[str]) -> None:
    common.call_sglang_generate = answer
    adapter = OpenAIAdapter(tokenizer=Characters(), sglang_url="http://unused")
    adapter.open_session(SESSION)
    server = run_app_in_thread(adapter.app, host="127.0.0.1")
    address = {"OPENAI_BASE_URL": f"http://127.0.0.1:{server.port}/v1", "OPENAI_API_KEY": SESSION}
    subprocess.run(command, env={**os.environ, **address}, check=True, timeout=60)
    finished = adapter.finish_session(SESSION, base_sample=Sample(index=0, prompt=""), reward=1.0)
    samples = asyncio.run(finished)
    trained = sum(sum(sample.loss_mask) for sample in samples)
    print(
        json.dumps(
            {"samples": len(samples), "generated": sum(map(len, generated)), "trained": trained}
        )
    )
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
