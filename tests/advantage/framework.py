"""The framework that `in_framework` runs in: its modules, its arguments, and our functions installed in it."""

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from tests.advantage.undo import uninstall

NAME = sys.argv[1] if len(sys.argv) > 1 else "slime"


def module(path: str) -> ModuleType:
    return importlib.import_module(f"{NAME}.{path}")


def loss_module() -> ModuleType:
    return module("backends.megatron_utils.loss" if NAME == "slime" else "backends.training_utils.loss")


def framework_args(**changes: Any) -> Namespace:
    from advantage.turn_table import CONVERTER

    flags = dict(
        advantage_estimator="ppo",
        custom_advantage_function_path=None,
        custom_convert_samples_to_train_data_path=CONVERTER,
        custom_megatron_init_path="advantage.patch.install",
        gamma_step=0.99,
        lambda_step=0.95,
        gamma_token=1.0,
        lambda_token=1.0,
        value_first_token_weight=1.0,
        kl_coef=0.2,
        kl_loss_type="k1",
        use_rollout_logprobs=False,
        use_opd=False,
        normalize_advantages=False,
        context_parallel_size=1,
        value_clip=0.5,
        qkv_format="thd",
        allgather_cp=False,
        log_multi_turn=False,
        log_passrate=False,
        log_correct_samples=False,
        ci_test=False,
        true_on_policy_mode=False,
        balance_data=False,
        balance_by_flops=False,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=64,
        global_batch_size=4,
    )
    if NAME == "miles":
        del flags["custom_advantage_function_path"]
    return Namespace(**{**flags, **changes})


@contextmanager
def installed(args: Namespace) -> Iterator[None]:
    from advantage import patch

    before = dict(vars(args))
    patch.install(args)
    try:
        yield
    finally:
        uninstall()
        vars(args).update(before)
