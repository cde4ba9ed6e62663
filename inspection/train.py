"""Trains a small policy on this machine, without a GPU, in a text environment with named actions or
an expert.

    slime-verlog train custom_configs/babyai.yaml --updates 40 --out outputs/babyai
    slime-verlog train my_env.yaml --seeds 0 1 2 --set env.max_steps=30 --set-flag lr=1e-4
    slime-verlog train my_env.yaml --model models/SmolLM2-135M-Instruct --set-flag lr=5e-6

If the environment's module has `expert_action(env)`, the policy first imitates it, with many random
actions in between. Otherwise it imitates random ones of the environment's `actions`, which teaches
it to answer in the right form, and PPO does the rest; an environment with neither is refused.
Tokenizer and context length are fitted to the environment's own texts.

A folder that holds a run is refused, unless --resume continues that run where it was stopped.

With --view, OUT/episodes.html shows the run while it goes on (`slime-verlog view OUT` writes the
same page later).

OUT gets policy_before/ (after imitation), policy_after/ (the last) and policy_best/ (the best on
held-out episodes) as Hugging Face folders, critic_after/ (for `branch --critic` and the flag
critic_load), the held-out episodes of every evaluation (episodes.jsonl), a sample of the training
turns with the trainer's numbers (training.jsonl), metrics.jsonl and summary.json.
"""

import signal
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from embedded import launch


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of `slime-verlog train`."""
    launch.add_arguments(parser, None, "outputs/train")
    parser.add_argument(
        "--view", action="store_true", help="open a page, OUT/episodes.html, and keep it current"
    )


def run(options: Namespace) -> int:
    """Train; returns 1 if an actor did not train or a held-out episode failed, and ends with 130 on
    Ctrl-C."""
    with page_of(options.out) if options.view else nullcontext():
        return launch.launch(options)


@contextmanager
def page_of(out: Path) -> Iterator[None]:
    """Follow the run in another process, which writes the page once more at the end."""
    # Drawing worlds takes time from training.
    words = ["view", str(out), "--follow", "--worlds", "60", "--open"]
    print(f"the page of this run: {out / 'episodes.html'}", flush=True)
    # A separate session: Ctrl-C reaches the training alone, and the page is finished after it.
    command = [sys.executable, "-m", "inspection", *words]
    # It prints errors only, such as a record that it cannot read.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60.0)  # for the last page
