"""Plays held-out episodes with a model or a scripted player, and writes a table with standard
errors.

    slime-verlog evaluate custom_configs/babyai.yaml --player random --out outputs/random
    slime-verlog evaluate custom_configs/babyai.yaml --player expert --out outputs/expert
    slime-verlog evaluate my_env.yaml --player MODEL_FOLDER --sweep memory.n=1,2,4
    slime-verlog evaluate my_env.yaml --player http://HOST:30000 --tokenizer MODEL_FOLDER
    slime-verlog evaluate my_env.yaml --player https://api.openai.com/v1 --model NAME

The results of `random` and `expert` are the two lines between which a model's result lies. An
address whose path ends in /v1 or /chat/completions is an OpenAI-compatible endpoint, which gets the
messages as they are. Any other address is an SGLang engine or router (/generate), which gets token
ids.

Each episode is appended to OUT/episodes.jsonl when it ends. The same command continues an
interrupted run, and plays failed episodes again. The exit code is 0 only if every episode was
played (see --allow-failures).
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("config", metavar="YAML", help="as for --custom-config-path")
    parser.add_argument(
        "--out", default="outputs/evaluation", metavar="FOLDER", help="default: %(default)s"
    )
    add = parser.add_argument_group("what is played").add_argument
    add(
        "--episodes",
        type=int,
        metavar="N",
        help="episodes per task; default: the YAML's eval.episodes",
    )
    add(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="per seed; adds pass@k and pass^k; default: %(default)s",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a YAML key; may be repeated",
    )
    add(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V1,V2",
        help="play once per value; may be repeated",
    )
    add_player_arguments(parser)


def add_player_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the player and of its failures."""
    parser.add_argument(
        "--player", required=True, help="random, expert, a Hugging Face folder, or an address"
    )
    failures = "failed episodes that do not fail the command"
    parser.add_argument("--allow-failures", type=int, default=0, metavar="N", help=failures)
    add = parser.add_argument_group("models").add_argument
    add("--tokenizer", metavar="FOLDER", help="tokenizer of the model behind an SGLang address")
    add("--model", metavar="NAME", help="model name, for an OpenAI-compatible address")
    add(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="variable with the key; default: %(default)s",
    )
    add("--temperature", type=float, default=1.0, help="of the sampling; default: %(default)s")
    longest = "longest answer; default: 512, and for a folder at most half of the context"
    add("--max-response-len", type=int, metavar="TOKENS", help=longest)
    context = "prompt and answer together; default: the model's. A longer prompt ends its episode"
    add("--max-context-len", type=int, metavar="TOKENS", help=context)
    add("--seed", type=int, default=42, help="of the sampling, for a folder; default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Play the episodes that are missing, write the table, and return the exit code."""
    from inspection.evaluate.session import evaluate

    return evaluate(options)
