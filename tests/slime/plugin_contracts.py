"""slime's own plugin contract tests, run against our hooks (`python -m tests.slime.plugin_contracts slime`).

Each contract first asserts the hook's signature, then calls the hook with stand-ins for slime's arguments. Our hooks
need the real ones, so a contract counts as kept when it passes, or when the hook was entered and refused the stand-ins.
Prints one JSON object: contract file to null, or to what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

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
FILES = [
    "test_plugin_generate_contracts",
    "test_plugin_path_loading_contracts",
    "test_plugin_rollout_contracts",
    "test_plugin_runtime_hook_contracts",
]


class Recorder:
    """A pytest plugin that keeps, per contract file, which contracts ran and which were broken."""

    def __init__(self, codes: set[CodeType]) -> None:
        self.codes = codes
        self.ran: dict[str, int] = dict.fromkeys(FILES, 0)
        self.broken: dict[str, list[str]] = {name: [] for name in FILES}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        name = item.path.stem
        self.ran[name] += call.when == "call"
        if call.excinfo is not None and not self._entered(call.excinfo):
            self.broken[name].append(f"{item.name}: {call.excinfo.exconly()}")
        return report

    def _entered(self, error: pytest.ExceptionInfo[BaseException]) -> bool:
        return any(entry.frame.code.raw in self.codes for entry in error.traceback)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken[Path(report.nodeid).stem].append(report.longreprtext)


def code_of(load: Callable[[str], Any], path: str) -> CodeType:
    hook = load(path)
    return (hook.__init__ if isinstance(hook, type) else hook).__code__


def main() -> None:
    allow_absent_packages()
    os.environ.update({f"SLIME_CONTRACT_{name}": path for name, path in HOOKS.items()})
    import slime
    from slime.utils.misc import load_function

    checkout = Path(slime.__file__).parents[1]
    os.chdir(checkout)  # the contracts name slime's files relative to it
    recorder = Recorder({code_of(load_function, path) for path in HOOKS.values()})
    files = [str(checkout / "tests" / "plugin_contracts" / f"{name}.py") for name in FILES]
    pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", *files], plugins=[recorder])
    outcome = {
        name: "\n".join(broken) or (None if recorder.ran[name] else "no contract ran")
        for name, broken in recorder.broken.items()
    }
    print("\n" + json.dumps(outcome))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
