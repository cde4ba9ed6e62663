"""What a checkpoint's tokenizer and chat template are like, and what they cannot do (`slime-verlog
check --model`)."""

from collections.abc import Callable
from typing import Any

from rollout.bridge.settings import RolloutSettings
from rollout.play.build import encoders_of
from rollout.tokens.rehearsal import describe, rehearse


def print_model(folder: str, settings: RolloutSettings) -> Callable[..., Any]:
    """Print the profile of the checkpoint and its warnings; return what makes an encoder from
    `tools`.

    Raises ConfigError or EncodingError if it is unusable.
    """
    encoders = encoders_of(folder, settings)
    encoder = encoders()
    print(f"model {folder}")
    for line in describe(encoder):
        print(f"  {line}")
    for history in ("window", "full"):
        for sentence in rehearse(encoder, history):
            print(f"  warning, history: {history}: {sentence}")
    return encoders
