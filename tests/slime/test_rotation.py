"""What a run leaves on disk: both roles' last common steps, TensorBoard events, and a model that
others can load."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from embedded.engine.server import EngineServer
from tests.scripts.conftest import Machine
from tests.slime.conftest import engine_flags
from tests.slime.cpu.harness import IMPORTS, REPO, Run
from tests.slime.test_resume import lose_critic, script_arguments

pytestmark = pytest.mark.slow

ROLLOUTS = 4


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Run], engine: EngineServer) -> Iterator[Run]:
    """Four batches, each of them saved, of which two are kept."""
    run = make_run("rotation", *engine_flags(engine), "--use-tensorboard", checkpoints_kept=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_DIR", str(run.work / "tensorboard"))
        run.train([*script_arguments(run), f"--num-rollout {ROLLOUTS}"])
        yield run


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*"))


def test_both_roles_and_the_rollout_keep_their_last_two_steps(run: Run) -> None:
    assert steps(run.work / "actor") == steps(run.work / "critic") == [2, 3]
    assert sorted(path.name for path in (run.work / "actor" / "rollout").iterdir()) == [
        "slime_verlog_2.pt",
        "slime_verlog_3.pt",
    ]


def test_a_checkpoint_becomes_a_hugging_face_folder_with_the_trained_weights(
    run: Run, tmp_path: Path
) -> None:
    image = Machine(tmp_path, run.slime.path)
    path = f"{IMPORTS}:{REPO}:$PYTHONPATH"
    image.install(
        "python3", f'export PYTHONPATH={path} SLIME_CPU_WORK=$HOME\nexec {run.slime.python} "$@"'
    )
    done = image.run("export_model.sh", str(run.work), str(run.model))
    assert done.returncode == 0, done.stderr[-3000:]
    folder = Path(done.stdout.splitlines()[-1].removeprefix("ready: "))
    trained, initial = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, run.model)
    )
    assert trained.keys() == initial.keys()
    moved = [name for name in trained if not torch.equal(trained[name], initial[name])]
    assert moved, "training changed nothing"
    for name, weight in trained.items():
        torch.testing.assert_close(weight.float(), initial[name].float(), rtol=0, atol=0.05)


def test_a_run_that_died_between_the_two_saves_goes_on_from_the_last_common_step(run: Run) -> None:
    critic = run.work / "critic"
    lose_critic(run, ROLLOUTS - 1)
    arguments = script_arguments(run)
    view = run.work / "resume" / "actor"
    assert arguments[arguments.index("--load") + 1] == str(view) and steps(view) == [ROLLOUTS - 2]
    run.train([*arguments, f"--num-rollout {ROLLOUTS + 1} --override-opt-param-scheduler"])
    assert steps(run.work / "actor") == steps(critic) == [3, 4]
