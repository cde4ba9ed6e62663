"""What a conversation costs slime's `train.py` on a CPU, with a sample per turn and with chains.

One batch of one episode whose prompts grow, in a tiny model, played by no engine. Printed for actor
and critic: tokens, CPU time of the third step, and peak memory. Needs a slime checkout
(docs/slime_inside.md, Testing without a GPU):

    python -m benchmarks.slime_conversation --turns 32 --tokens 150
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from embedded.engine.engine import EngineOptions
from embedded.engine.server import EngineServer
from tests.slime.conftest import engine_flags, ledger_settings, roles
from tests.slime.cpu.harness import Run, convert_checkpoint, find_slime, make_model

STEPS = 3


def measure(
    folder: Path, engine: EngineServer, model: Path, reference: Path, samples: str, turns: int
) -> Any:
    """Train `STEPS` batches; return the numbers of the last one by role."""
    work = folder / samples
    flags = (
        *engine_flags(engine),
        *(
            "--rollout-batch-size",
            str(turns),
            "--n-samples-per-prompt",
            "1",
            "--global-batch-size",
            str(turns),
        ),
        *(
            "--num-rollout",
            str(STEPS),
            "--rollout-max-response-len",
            "8",
            "--max-tokens-per-gpu",
            "100000",
        ),
        *("--rollout-function-path", "tests.slime.cpu.conversations.generate_conversation"),
        *roles(work / "roles.yaml", {"lr": 1e-5}, {"lr": 1e-6}),
    )
    run = Run(
        find_slime(), work, model, reference, {**ledger_settings(work), "samples": samples}, flags
    )
    run.train()
    found: dict[str, Any] = {}
    for role in ("actor", "critic"):
        (before,) = run.records(role, STEPS - 2)
        (last,) = run.records(role, STEPS - 1)
        tokens = last["data"]["tokens"]
        cpu_s = round(last["cpu_s"] - before["cpu_s"], 2)
        peak_mib = last["peak_kib"] // 1024
        found[role] = {
            "samples": len(tokens),
            "tokens": sum(map(len, tokens)),
            "cpu_s": cpu_s,
            "peak_mib": peak_mib,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument(
        "--tokens", type=int, default=150, help="that each turn adds to the conversation"
    )
    options = parser.parse_args()
    os.environ["CONVERSATION_TOKENS"] = str(options.tokens)
    with tempfile.TemporaryDirectory(prefix="sv-", dir="/tmp") as name:
        folder = Path(name)
        model = make_model(folder / "model")
        reference = convert_checkpoint(find_slime(), folder / "conversion", model)
        with EngineServer(EngineOptions(model_path=str(model), max_running_requests=8)) as engine:
            for samples in ("turns", "chains"):
                found = measure(folder, engine, model, reference, samples, options.turns)
                print(json.dumps({"samples": samples, "turns": options.turns, **found}), flush=True)


if __name__ == "__main__":
    main()
