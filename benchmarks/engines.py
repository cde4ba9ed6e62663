"""The engines of a benchmark: simulated ones on a simulated clock, or a real SGLang server on the wall clock.

A real server's weights may be dummies, because only its time matters. This writes a folder with the sizes of Qwen2.5-7B
for it; its responses end by chance, after N tokens on average:

    python -m benchmarks.engines FOLDER --tokenizer CHECKPOINT [--answer-tokens N]
    python -m sglang.launch_server --model-path FOLDER --load-format dummy --max-running-requests 96 --port 30000
    python -m benchmarks.rollout --server http://127.0.0.1:30000
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock
from urllib.parse import urlsplit

import aiohttp
import orjson

from benchmarks.parts import BARE_REQUESTS
from rollout.players.manager import HANG_S

REPOSITORY = Path(__file__).parents[1]
QWEN2_5_7B = {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16", "hidden_act": "silu"},
    **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    **{"num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768, "rope_theta": 1e6},
    **{"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02},
}
"""The sizes of Qwen2.5-7B, from its config.json."""


class SimulatedEngines:
    """A context with `benchmarks.engine_server` running for this process. Its calls block an event loop."""

    def __init__(self, vocabulary: Path, engines: int, places: int, answer_tokens: float) -> None:
        options = {"host": os.getpid(), "vocabulary": vocabulary, "engines": engines, "places": places}
        options["answer-tokens"] = answer_tokens
        flags = [f"--{name}={value}" for name, value in options.items()]
        self._command = [sys.executable, "-m", "benchmarks.engine_server", *flags]
        self.port = 0
        self.bodies: deque[bytes] = deque(maxlen=BARE_REQUESTS)
        """Requests of the last turns."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def now(self) -> float:
        """Return the simulated time in seconds."""
        return self._ask("/simulated/now")["now"]

    def count_players(self, pids: Sequence[int]) -> None:
        """Charge these processes, too."""
        self._ask("/simulated/hosts", {"pids": pids})

    def saturated(self, every: int, mode: str) -> dict[str, float]:
        """Ask what these engines reach with a queue that is never empty; also with new weights after `every` turns."""
        return self._ask(f"/simulated/saturated?every={every}&mode={mode}")

    def update(self, mode: str = "abort") -> None:
        """Load new weights, which aborts or retracts the requests in flight."""
        self._ask("/simulated/update", {"mode": mode})

    def sleep(self, seconds: float) -> None:
        """Wait for simulated seconds, as a trainer that works on other machines."""
        self._ask("/simulated/sleep", {"seconds": seconds})

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, float]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
            return json.load(reply)

    @contextmanager
    def sleeping(self) -> Iterator[None]:
        """Let `asyncio.sleep` wait in simulated time, for example in the pause after an aborted response."""
        url, real = f"http://127.0.0.1:{self.port}/simulated/sleep", asyncio.sleep

        async def sleep(seconds: float, result: Any = None) -> Any:
            if not 0 < seconds < HANG_S:  # the watch over players is about real time
                return await real(seconds, result)
            async with aiohttp.ClientSession() as session, session.post(url, json={"seconds": seconds}):
                return result

        with mock.patch.object(asyncio, "sleep", sleep):
            yield


class RealEngine:
    """A context with the same calls for a running SGLang server, whose `--max-running-requests` are `places`."""

    def __init__(self, url: str, places: int) -> None:
        self.url, self.places, self.version = url.rstrip("/"), places, 0
        self.port = urlsplit(url).port or 80
        self.bodies: deque[bytes] = deque(maxlen=BARE_REQUESTS)
        """Requests of the last turns."""

    def __enter__(self) -> Self:
        self.update()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def now(self) -> float:
        """Return seconds of the wall clock."""
        return time.perf_counter()

    def count_players(self, pids: Sequence[int]) -> None:
        """Do nothing: all processes have the machine's cores."""

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    @contextmanager
    def sleeping(self) -> Iterator[None]:
        """Leave `asyncio.sleep` as it is."""
        yield

    def update(self, mode: str = "abort") -> None:
        """Do what a trainer does beside loading weights: pause, which aborts or retracts, flush the cache, go on."""
        asyncio.run(self._update(mode))

    def saturated(self, every: int, mode: str) -> dict[str, float]:
        """Send the last turns' requests again with two for each place in flight, without and with new weights."""
        tokens, turns = asyncio.run(self._replay(0, mode))
        updated, _ = asyncio.run(self._replay(every, mode))
        return {"tokens_per_s": tokens, "turns_per_s": turns, "updated_tokens_per_s": updated}

    async def _update(self, mode: str = "abort") -> None:
        self.version += 1
        version = {"new_version": str(self.version), "abort_all_requests": False}
        calls = (("/pause_generation", {"mode": mode}), ("/flush_cache?timeout=30", {}))
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            for path, body in (*calls, ("/update_weight_version", version), ("/continue_generation", {})):
                async with session.post(self.url + path, json=body):
                    pass

    async def _replay(self, every: int, mode: str) -> tuple[float, float]:
        """Tokens and responses per second while requests wait; new weights after `every` responses, never if 0.

        Both are NaN if there are not enough requests.
        """
        await self._update()
        waiting, done = deque(self.bodies), list[tuple[float, int]]()
        headers = {"Content-Type": "application/json"}

        async def send() -> None:
            while waiting:
                body = waiting.popleft()
                async with session.post(self.url + "/generate", data=body, headers=headers) as response:
                    found = orjson.loads(await response.read())["meta_info"]
                if found["finish_reason"]["type"] == "abort":
                    waiting.append(body)
                elif waiting:
                    done.append((time.perf_counter(), found["completion_tokens"]))
                    if every and len(done) % every == 0:
                        await self._update(mode)

        connector, forever = aiohttp.TCPConnector(limit=4 * self.places), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=forever) as session:
            await asyncio.gather(*(send() for _ in range(2 * self.places)))
        if len(done) <= self.places:
            return float("nan"), float("nan")
        seconds = done[-1][0] - done[self.places - 1][0]
        counted = done[self.places :]
        return sum(tokens for _, tokens in counted) / seconds, len(counted) / seconds


def main() -> None:
    """Write the folder of a model with dummy weights, which choose tokens almost evenly; one in N ends a response."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", required=True, help="a checkpoint of the Qwen2.5 family")
    parser.add_argument("--answer-tokens", type=float, default=150.0, help="mean tokens of a response")
    options = parser.parse_args()
    AutoTokenizer.from_pretrained(options.tokenizer).save_pretrained(options.folder)
    content = {**QWEN2_5_7B, "eos_token_id": list(range(0, QWEN2_5_7B["vocab_size"], round(options.answer_tokens)))}
    (options.folder / "config.json").write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
