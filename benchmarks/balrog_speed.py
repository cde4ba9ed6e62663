"""Steps per CPU-second of one of BALROG's environments, played as its evaluator does: text actions,
its own settings.

    $BALROG_PYTHON benchmarks/balrog_speed.py FAMILY TASK SECONDS

`benchmarks/envs.py` calls it. It needs an interpreter that can import BALROG, which other versions
of packages have.
"""

import random
import sys
import time
from pathlib import Path

import balrog
from balrog.environments import make_env
from omegaconf import OmegaConf


def speed(family: str, task: str, seconds: float) -> float:
    """Play random actions for `seconds` of CPU time; a first episode of up to 50 steps is not
    measured."""
    config = OmegaConf.load(Path(balrog.__file__).parent / "config" / "config.yaml")
    rng = random.Random(0)
    seed = 0
    steps = 0
    spent = 0.0
    while spent < seconds:
        env = make_env(family, task, config)
        env.reset(seed=seed)
        actions = list(env.get_wrapper_attr("language_action_space"))
        taken = 0
        done = False
        began = time.process_time()
        while not done and (taken < 50 or (seed and spent + time.process_time() - began < seconds)):
            _, _, terminated, truncated, _ = env.step(rng.choice(actions))
            taken = taken + 1
            done = terminated or truncated
        if seed:
            steps = steps + taken
            spent = spent + time.process_time() - began
        env.close()
        seed += 1
    return steps / spent


if __name__ == "__main__":
    print(speed(sys.argv[1], sys.argv[2], float(sys.argv[3])))
