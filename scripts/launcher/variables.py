"""What the user of a script may set: variables and options, and the text of --help."""

import argparse
from collections.abc import Mapping
from typing import Literal, Self, TypeVar, get_args

from pydantic import ConfigDict, model_validator

from scripts.launcher.models import VISION_MODELS
from scripts.launcher.own_python import header
from slime_verlog import ConfigError, Field, Settings, read_settings


class Paths(Settings):
    """Where slime, Megatron, models and runs are."""

    model_config = ConfigDict(alias_generator=str.upper)

    slime_path: str = "/root/slime"
    """the checkout whose train.py runs"""
    megatron_path: str = "/root/Megatron-LM"
    """the checkout of Megatron"""
    models: str = "/root/models"
    """scripts/prepare_model.sh puts checkpoints here"""
    output: str = "/root/runs"
    """one folder per experiment: checkpoints, YAML files, TensorBoard"""


class Variables(Paths):
    """What all kinds of runs have."""

    config: str
    """the YAML: environment, memory, warm-up"""
    experiment: str = ""
    """names the run's folder, with MODEL; unset: the script, and a CONFIG other than the
    script's"""
    model: str
    """a folder in MODELS; the option --model comes first"""
    prompt_len: int = Field(ge=1)
    """longest prompt, in tokens"""
    response_len: int = Field(ge=1)
    """longest response, in tokens"""
    num_gpus: int = Field(ge=1)
    """GPUs per node"""
    num_nodes: int = Field(default=1, ge=1)
    """nodes"""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share a layer"""
    rollout_gpus: int | None = Field(default=None, ge=1)
    """GPUs per node that serve, with --disaggregated; unset: half of them; of several nodes, half
    serve"""
    engine_gpus: int | None = Field(default=None, ge=1)
    """GPUs per engine; unset: 1"""
    max_tokens_per_gpu: int | None = Field(default=None, ge=1)
    """tokens of a micro-batch; unset: four of the longest turns"""
    mem_fraction: str = "0.55"
    """SGLang's share of the GPUs' memory"""
    actor_lr: str = "1e-6"
    """learning rate of the actor"""
    reference: str = ""
    """what actor and critic start from, and KL measures; unset: what prepare_model.sh made of
    MODEL"""
    train_script: str = "train.py"
    """or train_async.py, which needs --disaggregated (docs/asynchronous.md)"""
    checkpoints_kept: int | Literal["all"] = 2
    """steps kept on disk; all: keep every step"""
    wandb_project: str = ""
    """log to this Weights & Biases project instead of to TensorBoard"""
    ray_address: str = "http://127.0.0.1:8265"
    """the job server of the Ray cluster, as an HTTP address"""
    job_variables: str = ""
    """names of variables, with commas, that the job gets where they are set"""


class PpoVariables(Variables):
    """What runs with an actor and a critic have."""

    turns: int = Field(ge=1)
    """turns per batch"""
    step_turns: int = Field(ge=1)
    """turns per training step"""
    updates: int = Field(ge=1)
    """batches that train the actor, after the critic's warm-up"""
    critic_only: int = Field(default=0, ge=0)
    """batches before them that train the critic alone, with a YAML without critic_warmup"""
    critic_lr: str = "1.0e-5"
    """learning rate of the critic"""
    pretrained_critic: str = ""
    """what run_value_pretraining.sh saved: the critic starts there, without warm-up"""
    eval_interval: int | None = Field(default=None, ge=1)
    """batches between evaluations; unset: at most 5, the last after the last update"""
    pretraining: str = ""
    """run_value_pretraining.sh sets it, and only with it the next four have a meaning"""
    batches: int | None = Field(default=None, ge=1)
    """batches that are played for value pretraining; unset: as many as the warm-up collects"""
    held_out: str = "0.2"
    """share of held-out turns"""
    passes: str = "50"
    """most passes over the other turns"""
    patience: str = "3"
    """passes without a gain that end it"""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.turns % self.step_turns:
            raise ConfigError(
                f"STEP_TURNS={self.step_turns} does not divide TURNS={self.turns}; change one of "
                "them"
            )
        if self.pretraining and self.pretrained_critic:
            raise ConfigError(
                "value pretraining makes a critic; unset PRETRAINED_CRITIC, or run a PPO script"
            )
        own = {"batches", "held_out", "passes", "patience"}
        if not self.pretraining and (unused := sorted(own & self.model_fields_set)):
            raise ConfigError(
                f"{unused[0].upper()} has no meaning without value pretraining; unset it, or run "
                "run_value_pretraining.sh"
            )
        return self


V = TypeVar("V", bound=Paths)


def read_variables(
    model: type[V], defaults: Mapping[str, str], environment: Mapping[str, str]
) -> V:
    """Return the variables: those of the environment, then the script's. An empty one counts as
    unset.

    Raises ConfigError, which names the variable, for a value that is missing, mistyped or out of
    range.
    """
    given = dict(defaults)
    values: dict[str, str | int] = {}
    for field in model.model_fields.values():
        name = str(field.alias)
        default = given.pop(name, "")
        text = environment.get(name) or default
        is_number = int in (field.annotation, *get_args(field.annotation)) and text.isdecimal()
        if text:
            values[name] = int(text) if is_number else text
    return read_settings(model, {**values, **given})


def parser_of(script: str) -> argparse.ArgumentParser:
    """Return the parser of a script's options; slime's own flags, after `--`, are split off
    before."""
    usage = f"bash scripts/{script} [--dry-run | --flat] [--model NAME] [--disaggregated] [-- SLIME FLAGS]"
    parser = argparse.ArgumentParser(
        script,
        usage=usage,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--dry-run",
        action="store_true",
        help="write the YAML files, print the job as a script, start nothing",
    )
    add(
        "--flat",
        action="store_true",
        help="print the run as one script in slime's style; write and start nothing",
    )
    add("--model", metavar="NAME", help="overrides MODEL: {models}")
    add(
        "--disaggregated",
        action="store_true",
        help="separate GPUs for training and serving; else they take turns",
    )
    add("--images", action="store_true", help=argparse.SUPPRESS)
    add(
        "--help",
        "-h",
        action="store_true",
        help="print this text; what follows -- overrides the script's flags",
    )
    return parser


def help_text(script: str, variables: Paths, images: bool) -> str:
    """Return the script's comment, its options, and each variable with its value and meaning."""
    models = f"{', '.join(VISION_MODELS)}: those that slime trains with pictures"
    if not images:
        models = "Qwen2.5-3B-Instruct, Qwen2.5-7B-Instruct, Qwen3-4B, ...: any model in slime's scripts/models/"
    lines = [header(script), "", parser_of(script).format_help().format(models=models)]
    lines.append("environment variables, with their current values:")
    for name, field in type(variables).model_fields.items():
        value = getattr(variables, name)
        lines.append(f"  {field.alias}={'' if value is None else value}    {field.description}")
    return "\n".join(lines)
