"""What a checkpoint's tokenizer and chat template are like, and what they cannot do (`slime-verlog check --model`)."""

from rollout.bridge.settings import RolloutSettings
from rollout.play.build import encoders_of
from rollout.tokens.rehearsal import describe, rehearse


def print_model(folder: str, settings: RolloutSettings) -> None:
    """Print the profile of the checkpoint and its warnings; raises ConfigError or EncodingError if it is unusable."""
    encoder = encoders_of(folder, settings)()
    print(f"model {folder}")
    for line in describe(encoder):
        print(f"  {line}")
    for history in ("window", "full"):
        for sentence in rehearse(encoder, history):
            print(f"  warning, history: {history}: {sentence}")
