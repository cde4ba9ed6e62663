"""BabyAI end to end on one machine without a GPU: imitation, evaluation, PPO, evaluation, report.

`python -m embedded.quickstart --seed 0` writes outputs/quickstart/; with `--seeds 0 1 2`, each seed
has a folder there. It is `slime-verlog train` with a default configuration. The same command again
continues a run that was stopped, and shows the result of a finished one.
"""

import argparse
from collections.abc import Sequence

from embedded.launch import add_arguments, launch
from slime_verlog import command

CONFIG = "custom_configs/quickstart.yaml"


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Train one seed, or several and print their table."""
    parser = argparse.ArgumentParser(
        description="Train a tiny policy on BabyAI with PPO and dual-discount GAE."
    )
    add_arguments(parser, CONFIG, "outputs/quickstart", resume=True)
    if code := launch(parser.parse_args(argv)):
        raise SystemExit(code)


if __name__ == "__main__":
    main()
