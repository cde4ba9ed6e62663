"""Notes which role a training process has, and checks the parameters that its model freezes, and
the critic's head.

A critic that was saved with another head is refused; the head is taken from there if the YAML does
not say. A pattern that matches nothing is refused, and so is an optimizer's state that was saved
with another list.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from advantage.errors import FlagError, UnsupportedFrameworkError
from advantage.exchange import current_layout
from advantage.flags import FROZEN, advantage_flags
from advantage.hl_gauss import HlGauss, describe_head, hl_gauss_of
from advantage.patch.versions import Slime, wrap
from advantage.saved_critic import RECORD, head_record, keys_taken_over
from advantage.settings import ROLE, advantage_settings

logger = logging.getLogger(__name__)


def install_roles(slime: Slime) -> None:
    """Note the role in `args` before slime builds the role's model, and check the model's frozen
    parameters."""
    if not hasattr(slime.actor, "initialize_model_and_optimizer"):
        return

    def initialized(
        initialize: Callable[..., Any], args: Any, role: str = "actor", *rest: Any, **named: Any
    ) -> Any:
        setattr(args, ROLE, role)
        frozen = advantage_settings(args).critic_frozen
        if role == "critic" and frozen:
            setattr(args, FROZEN, list(frozen))
        saved = saved_args(args)
        check_saved_frozen(args, saved)
        if role == "critic":
            take_over_head(args, saved)
        result = initialize(args, role, *rest, **named)
        patterns = advantage_flags(args).frozen
        named_parameters = (item for chunk in result[0] for item in chunk.named_parameters())
        # The names are those without DDP's wrappers.
        parameters = {re.sub(r"^(module\.)+", "", name): p for name, p in named_parameters}
        for name in report_frozen(role, parameters, patterns):
            if parameters[name].requires_grad:
                raise UnsupportedFrameworkError(
                    f"slime trains {name} although it is to be frozen; leave critic_frozen out"
                )
        if role == "critic":
            check_head(parameters, hl_gauss_of(advantage_settings(args)))
        return result

    wrap(slime.actor, "initialize_model_and_optimizer", initialized)


def check_head(parameters: Mapping[str, torch.Tensor], head: HlGauss | None) -> None:
    """Raise FlagError unless a critic's output layer, on the stage that has it, is a value head
    that is trained."""
    outputs = 1 if head is None else head.bins
    for name, weight in parameters.items():
        if name.endswith("output_layer.weight") and (
            len(weight) != outputs or not weight.requires_grad
        ):
            trained = (
                "trained"
                if weight.requires_grad
                else f"frozen by {FROZEN} or only_train_params_name_list"
            )
            raise FlagError(
                f"the critic's value head {name} must have {outputs} output{'s' * (outputs > 1)} "
                f"and be trained; it has {len(weight)} and is {trained}: give the critic its own "
                "list under its overrides in --megatron-config-path"
            )


def take_over_head(args: Any, saved: Any) -> None:
    """Check the critic that this one starts from, whose saved arguments are `saved`, and take its
    head over.

    Raises ConfigError for a critic with another head, also if the optimizer starts afresh, or one
    that value pretraining left with a low score.
    """
    record = getattr(saved, RECORD, None)
    if record is None and (
        getattr(saved, ROLE, "") == "critic" or getattr(saved, "loss_type", "") == "value_loss"
    ):
        record = {"value_loss": "mse"}  # saved before there were others, or without this patch
    if record is not None:
        place = str(advantage_flags(args).load)
        for key, value in keys_taken_over(advantage_settings(args), record, place).items():
            setattr(args, key, value)
    settings = advantage_settings(args)
    head = hl_gauss_of(settings)
    setattr(args, RECORD, head_record(settings))
    if head is not None and current_layout().stage.rank == 0:
        logger.info("the critic's head is %s; --value-clip is ignored", describe_head(head))


def report_frozen(role: str, names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Log and return the parameters that match a pattern; raises FlagError if a pattern matches
    none on any stage."""
    if not patterns:
        return []
    names = list(names)
    frozen = [name for name in names if any(re.search(pattern, name) for pattern in patterns)]
    counts = torch.tensor(
        [sum(bool(re.search(pattern, name)) for name in names) for pattern in patterns]
    )
    layout = current_layout()
    totals = layout.pipeline.total(counts, like=counts.new_empty(0))
    for k, pattern in enumerate(patterns):
        if not totals[k]:
            raise FlagError(
                f"{pattern!r} matches none of the {role}'s parameters, such as "
                f"{', '.join(names[:3])}; correct critic_frozen, or {FROZEN} if that is where it "
                "was given"
            )
    if layout.stage.rank == 0:
        logger.info(
            "the %s does not train %d of %d parameters: %s",
            role,
            len(frozen),
            len(names),
            ", ".join(frozen),
        )
    return frozen


def saved_args(args: Any) -> Any:
    """Read slime's arguments in the checkpoint that this process starts from; None for a converted
    one, or without."""
    flags = advantage_flags(args)
    folder = Path(flags.load or "")
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return None
    # Megatron takes step 0 for absent, too.
    step = flags.ckpt_step or tracker.read_text(encoding="utf-8").strip()
    common = folder / f"iter_{step:0>7}" / "common.pt"
    return torch.load(common, weights_only=False).get("args") if common.is_file() else None


def check_saved_frozen(args: Any, saved_args: Any) -> None:
    """Raise FlagError for an optimizer that resumes with another list of frozen parameters."""
    flags = advantage_flags(args)
    if saved_args is None or flags.finetune or flags.no_load_optim:
        return
    saved = advantage_flags(saved_args).frozen
    given = flags.frozen
    if saved != given:
        raise FlagError(
            f"{flags.load} was trained with frozen parameters {saved}, this run has {given}, and "
            "the optimizer's state fits only the former: give the same critic_frozen (or "
            f"{FROZEN}), or start the optimizer afresh with no_load_optim: true in the role's "
            "overrides"
        )
