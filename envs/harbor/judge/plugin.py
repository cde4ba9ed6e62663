"""A plugin of pytest: a session counts only if all of its tests ran, with the settings that the task brought."""

import os
import sys

import pytest
from sitecustomize import SHIPPED, is_agents, judgement  # pyright: ignore[reportAttributeAccessIssue] - not Debian's

_left = set()
_main_pid = os.getpid()
if "PYTEST_XDIST_WORKER" not in os.environ:
    judgement.begin()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    file = str(getattr(config, "inipath", None) or "")
    if file and is_agents(file) and vars(config).get("_inicfg", vars(config).get("inicfg")) and file not in SHIPPED:
        raise pytest.UsageError(file + " was written by the agent")


def pytest_collection_finish(session):
    _left.update(item.nodeid for item in session.items)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    # Before the other hooks, which may put another exception in the place of this one.
    files = [str(entry.path) for entry in call.excinfo.traceback] if call.excinfo is not None else []
    outcome = yield
    report = outcome.get_result()
    if report.skipped and any(map(is_agents, files)):
        report.outcome, report.longrepr = "failed", "the agent's code skipped the test"
        report.__dict__.pop("wasxfail", None)
    if call.when == "teardown":
        _left.discard(item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if exitstatus == 0 and _left and not hasattr(session.config, "workerinput"):
        session.exitstatus = 1
    session.config._judged = int(session.exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    if os.getpid() != _main_pid or hasattr(config, "workerinput"):
        return
    judgement.end()
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if (main is not None and main.name == "pytest.__main__") or os.path.basename(sys.argv[0]) in ("pytest", "py.test"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(getattr(config, "_judged", 4))  # handlers that the agent's code registered do not run
