"""Runs a script of a slime checkout, unchanged, in this harness: run_train.py SCRIPT
ARGUMENTS..."""

import os
import runpy
import sys


def main() -> None:
    """Start a Ray of its own for train.py; other scripts (checkpoint conversion) run as they
    are."""
    script, work = sys.argv[1], os.environ["SLIME_CPU_WORK"]
    sys.argv = sys.argv[1:]
    if os.path.basename(script).startswith("train"):
        import ray

        prefixes = ("SLIME_", "PYTHON", "TORCH", "OMP_", "TOKENIZERS", "CUDA_")
        passed_on = [name for name in os.environ if name.startswith(prefixes)]
        ray.init(
            num_cpus=16,
            num_gpus=int(os.environ.get("SLIME_CPU_GPUS", "1")),
            include_dashboard=False,
            object_store_memory=200 << 20,
            _temp_dir=os.path.join(work, "ray"),
            runtime_env={"env_vars": {name: os.environ[name] for name in passed_on}},
        )
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
