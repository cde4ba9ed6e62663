"""Trains a small policy on this machine, without a GPU, in a text environment with named actions or an expert.

    slime-verlog train custom_configs/babyai.yaml --updates 40 --out outputs/babyai
    slime-verlog train my_env.yaml --seeds 0 1 2 --episodes 32 --set env.max_steps=30 --set-flag lr=1e-4

If the environment's module has `expert_action(env)`, the policy first imitates it, with many random actions in between.
Otherwise it imitates random ones of the environment's `actions`, which teaches it to answer in the right form, and PPO
does the rest; an environment with neither is refused. Tokenizer and context length are fitted to the environment's own
texts.

A folder that holds a run is refused, unless --resume continues that run where it was stopped, or --overwrite deletes it
first.

OUT gets policy_before/ (after imitation), policy_after/ (the last) and policy_best/ (highest win rate) as Hugging Face
folders, the held-out episodes of every evaluation (episodes.jsonl), metrics.jsonl, curve.png and summary.json.
"""

from argparse import ArgumentParser, Namespace

from embedded import launch


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags of `slime-verlog train`."""
    launch.add_arguments(parser, None, "outputs/train")


def run(options: Namespace) -> int:
    """Train; returns 1 if an actor did not train or a held-out episode failed, and ends with 130 on Ctrl-C."""
    return launch.launch(options)
