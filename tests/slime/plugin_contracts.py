"""Runs slime's own plugin contract tests, as slime ships them, on our hooks (`python -m
tests.slime.plugin_contracts`).

Prints one JSON object: how many contracts ran, and the names of those that failed. Their errors are
above it.
"""

import json
import os
from pathlib import Path

import pytest

from tests.fixtures.stand_ins import allow_absent_packages

HOOKS = {
    "ROLLOUT_FUNCTION_PATH": "rollout.fixed_turn.generate_rollout",
    "EVAL_FUNCTION_PATH": "rollout.fixed_turn.generate_rollout",
    "CUSTOM_GENERATE_FUNCTION_PATH": "rollout.generate.generate",
    "DATA_SOURCE_PATH": "rollout.data_source.EpisodeSource",
    "CUSTOM_ROLLOUT_LOG_FUNCTION_PATH": "inspection.metrics.log_rollout",
    "CUSTOM_EVAL_ROLLOUT_LOG_FUNCTION_PATH": "inspection.metrics.log_eval_rollout",
    "CUSTOM_CONVERT_SAMPLES_TO_TRAIN_DATA_PATH": "rollout.samples.convert_samples_to_train_data",
    "ROLLOUT_DATA_POSTPROCESS_PATH": "advantage.kl_split.log_kl_split",
}


class Recorder:
    """A pytest plugin that counts contracts and keeps the names of those that fail."""

    def __init__(self) -> None:
        self.ran = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed:
            self.failed.append(report.nodeid.rpartition("::")[2])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def main() -> None:
    allow_absent_packages()
    os.environ.update({f"SLIME_CONTRACT_{name}": path for name, path in HOOKS.items()})
    import slime

    os.chdir(Path(slime.__file__).parents[1])  # the contracts name slime's files relative to it
    recorder = Recorder()
    options = "-q --tb=short -p no:cacheprovider --import-mode=importlib tests/plugin_contracts"
    pytest.main(options.split(), plugins=[recorder])
    print("\n" + json.dumps({"ran": str(recorder.ran), "failed": " ".join(recorder.failed)}))


if __name__ == "__main__":
    main()
