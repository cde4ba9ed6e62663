"""The patch refuses other versions and flags, with a module of slime's shape; tests/slime has what
it does in slime."""

import json
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from advantage import patch
from advantage.errors import FlagError, UnsupportedFrameworkError
from tests.fixtures.inside_slime import uninstall


def fake_slime(source: str = "") -> ModuleType:
    """A loss module of slime's shape; `source` overrides parts of it."""
    loss = ModuleType("slime.backends.megatron_utils.loss")
    code = """
def compute_advantages_and_returns(args, rollout_data):
    if args.custom_advantage_function_path is not None:
        rollout_data["hook"] = args.custom_advantage_function_path
def value_loss_function(args, batch, logits, sum_of_sample_mean):
    return sum_of_sample_mean(logits), {}
def policy_loss_function(args, batch, logits, sum_of_sample_mean):
    return None, {}
def loss_function(args, batch, num_microbatches, logits):
    return value_loss_function(args, batch, logits, None)
"""
    exec(code + source, loss.__dict__)
    return loss


@pytest.fixture
def slime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a fake slime into the process; undone afterwards, patch included."""

    def put(source: str = "", actor: ModuleType | None = None) -> ModuleType:
        loss = fake_slime(source)
        monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils.loss", loss)
        if actor is not None:
            monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils.actor", actor)
        return loss

    yield put
    uninstall()


def flags(**changes: Any) -> Namespace:
    good = dict(
        advantage_estimator="ppo",
        custom_advantage_function_path=None,
        custom_convert_samples_to_train_data_path="rollout.samples.convert_samples_to_train_data",
    )
    return Namespace(**{**good, **changes})


def test_each_role_in_one_process_gets_its_flag_while_functions_are_wrapped_once(
    slime: Any,
) -> None:
    loss = slime()
    whitened = {"normalize_advantages": True, "context_parallel_size": 2}
    actor, critic = flags(**whitened), flags(**whitened)
    patch.install(actor)
    wrapped = loss.value_loss_function, loss.compute_advantages_and_returns
    patch.install(critic)
    assert (loss.value_loss_function, loss.compute_advantages_and_returns) == wrapped
    assert (
        actor.custom_advantage_function_path == critic.custom_advantage_function_path == patch.HOOK
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage_estimator": "grpo"}, "--advantage-estimator is grpo"),
        (
            {"custom_convert_samples_to_train_data_path": None},
            "--custom-convert-samples-to-train-data-path rollout",
        ),
        (
            {"custom_advantage_function_path": "mine.gae"},
            "--custom-advantage-function-path is mine.gae",
        ),
        ({"compute_advantages_and_returns": False}, "--disable-compute-advantages-and-returns"),
        (
            {"value_first_token_weight": 0.0},
            "value_first_token_weight must be greater than 0, got 0.0",
        ),
        (
            {"critic_frozen": ["mlp"], "freeze_params_name_list": ["attention"]},
            "leave one of them out",
        ),
        ({"critic_frozen": ["mlp("]}, "is not a regular expression"),
    ],
)
def test_flags_that_would_train_on_other_advantages_are_refused(
    slime: Any, changes: dict, message: str
) -> None:
    loss = slime()
    before = dict(loss.__dict__)
    with pytest.raises(ValueError, match=message):
        patch.install(flags(**changes))
    assert loss.__dict__ == before


@pytest.mark.parametrize("key", ["custom_megatron_init_path", "advantage_estimator"])
def test_a_role_configured_out_of_the_patch_is_refused(
    slime: Any, tmp_path: Path, key: str
) -> None:
    slime()
    path = tmp_path / "roles.yaml"
    path.write_text(
        json.dumps({"megatron": [{"role": "critic", "overrides": {key: "other", "lr": "1e-5"}}]})
    )
    with pytest.raises(FlagError, match=f"overrides {key} for role critic"):
        patch.install(flags(megatron_config_path=str(path)))


def test_two_lambdas_for_the_critic_are_refused(slime: Any, tmp_path: Path) -> None:
    slime()
    path = tmp_path / "roles.yaml"
    path.write_text("megatron:\n- {role: critic, overrides: {lambda_step: 1.0}}\n")
    patch.install(flags(megatron_config_path=str(path)))
    with pytest.raises(
        FlagError, match="overrides lambda_step for the critic, and the YAML has lambda_critic: 1,"
    ):
        patch.install(flags(megatron_config_path=str(path), lambda_critic=1.0))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def compute_advantages_and_returns(args, rollout_data): pass",
            "no --custom-advantage-function-path",
        ),
        ("def compute_advantages_and_returns(args, batch, more): pass", "expected parameters"),
        ("def value_loss_function(args, batch, logits): pass", "expected parameters"),
        ("del value_loss_function", "is missing"),
        ("def loss_function(args): pass", "does not call value_loss_function"),
    ],
)
def test_an_unknown_version_is_refused_and_the_known_ones_are_named(
    slime: Any, source: str, message: str
) -> None:
    loss = slime(source)
    before = dict(loss.__dict__)
    with pytest.raises(UnsupportedFrameworkError, match=rf"{message}.*slime v0\.3\.1 and main"):
        patch.install(flags())
    assert loss.__dict__ == before


def test_a_training_process_that_uses_another_function_is_refused(slime: Any) -> None:
    actor = ModuleType("slime.backends.megatron_utils.actor")
    actor.compute_advantages_and_returns = lambda args, rollout_data: None
    slime(actor=actor)
    with pytest.raises(UnsupportedFrameworkError, match="something else replaced one of them"):
        patch.install(flags())


class Schedule:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def step(self, increment: int) -> None:
        self.steps.append(increment)

    def get_lr(self) -> float:
        return 0.1


@pytest.mark.parametrize(("role", "passes"), [("critic", 3), ("actor", 1)])
def test_the_critic_trains_several_times_per_batch_and_its_schedule_advances_once(
    slime: Any, role: str, passes: int
) -> None:
    calls: list[tuple[int, str, float]] = []

    def train(
        rollout_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any, iterator: Any
    ) -> None:
        calls.append((rollout_id, model[0].role, opt_param_scheduler.get_lr()))
        opt_param_scheduler.step(increment=8)

    actor = ModuleType("slime.backends.megatron_utils.actor")
    loss = slime(actor=actor)
    actor.train, actor.compute_advantages_and_returns = train, loss.compute_advantages_and_returns  # type: ignore
    patch.install(flags(critic_updates=3))
    schedule, model = Schedule(), [Namespace(role=role)]
    actor.train(7, model, None, schedule, None)
    names = ["critic-pass1", "critic-pass2", "critic"] if passes == 3 else ["actor"]
    assert calls == [(7, name, 0.1) for name in names]
    assert schedule.steps == [8] and model[0].role == role


def model_building_slime(slime: Any, frozen: bool) -> ModuleType:
    """A training process whose models are one linear layer; it freezes parameters as slime does, or
    not at all."""

    def initialize(args: Namespace, role: str = "actor") -> tuple[Any, ...]:
        layer = torch.nn.Linear(2, 2)
        for name, parameter in layer.named_parameters():
            patterns = args.freeze_params_name_list or () if frozen else ()
            parameter.requires_grad_(name not in patterns)
        return [torch.nn.Sequential(), layer], None, None, 0

    actor = ModuleType("slime.backends.megatron_utils.actor")
    loss = slime(actor=actor)
    actor.compute_advantages_and_returns = loss.compute_advantages_and_returns
    actor.initialize_model_and_optimizer = initialize
    return actor


def test_a_slime_that_does_not_freeze_is_refused_and_so_is_a_pattern_without_a_match(
    slime: Any,
) -> None:
    actor = model_building_slime(slime, frozen=False)
    for pattern, message in (
        ("weight", "trains weight although"),
        ("wieght", "'wieght' matches none of the critic's"),
    ):
        args = flags(critic_frozen=[pattern], freeze_params_name_list=None)
        patch.install(args)
        with pytest.raises((FlagError, UnsupportedFrameworkError), match=message):
            actor.initialize_model_and_optimizer(args, "critic")


@pytest.mark.parametrize(
    ("outputs", "trained", "error", "message"),
    [
        (1, True, None, ""),
        (
            1,
            False,
            FlagError,
            "head language_model.output_layer.weight .* has 1 and is frozen by freeze_params.* "
            "overrides",
        ),
        (
            9,
            True,
            FlagError,
            "output_layer.weight must have 1 output and be trained; it has 9 and is trained",
        ),
    ],
)
def test_a_critic_without_a_head_that_learns_values_is_refused(
    slime: Any, outputs: int, trained: bool, error: type[Exception] | None, message: str
) -> None:
    def initialize(args: Namespace, role: str = "actor") -> tuple[Any, ...]:
        head = torch.nn.Linear(2, outputs).requires_grad_(trained)
        return (
            [torch.nn.ModuleDict({"language_model": torch.nn.ModuleDict({"output_layer": head})})],
            None,
            None,
            0,
        )

    actor = model_building_slime(slime, frozen=True)
    actor.initialize_model_and_optimizer = initialize
    patch.install(flags())
    actor.initialize_model_and_optimizer(flags(), "actor")
    with pytest.raises(error, match=message) if error else nullcontext():
        actor.initialize_model_and_optimizer(flags(), "critic")
