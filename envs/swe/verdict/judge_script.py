"""Runs pytest on the required tests inside the sandbox, and reports every signed step through a pipe.

Standard library and pytest only, and old syntax, because the repository's own Python runs it. The report is a
chain of records, each with a running number and a signature; the key comes through stdin. A stopped process, a lost
record or a forged one breaks the chain. Tested code shares this process and could in principle find the key, so
`evaluate.py` does not rely on the report alone.
"""

import hashlib
import hmac
import json
import os
import sys
from importlib import import_module

import pytest


def make_teller(fd, key):
    """A function that signs a record and writes it to `fd`; number and key live in its closure."""
    state = {"number": 0}
    write, dumps, new, sha = os.write, json.dumps, hmac.new, hashlib.sha256

    def tell(kind, **values):
        body = dumps([state["number"], kind, values]).encode()
        state["number"] += 1
        line = new(key, body, sha).hexdigest().encode() + b" " + body + b"\n"
        while line:
            line = line[write(fd, line) :]

    return tell


WATCHED = (
    "_pytest.approx",
    "_pytest.assertion.rewrite",
    "_pytest.assertion.util",
    "_pytest.main",
    "_pytest.outcomes",
    "_pytest.python",
    "_pytest.python_api",
    "_pytest.raises",
    "_pytest.reports",
    "_pytest.runner",
    "_pytest.skipping",
    "_pytest.unittest",
    "pluggy._callers",
    "pluggy._hooks",
    "pluggy._manager",
    "pytest",
    "unittest.case",
    "builtins",
    "json",
    "hmac",
    "os",
)


def code_of(value):
    """What a function will run, so that a swapped body shows even where the object stayed the same."""
    return id(getattr(value, "__code__", None))


def fingerprint():
    """Identity of every function and method that decides about passing."""
    found = {}
    for name in WATCHED:
        for key, value in list(vars(sys.modules[name]).items()) if name in sys.modules else []:
            if name == "builtins" and key == "_":
                continue
            if callable(value):
                found[name, key] = (id(value), code_of(value))
            if isinstance(value, type) and value.__module__ == name:
                for attribute, method in list(vars(value).items()):
                    if callable(method) or isinstance(method, (classmethod, staticmethod, property)):
                        found[name, key, attribute] = (id(method), code_of(method))
    return found


class Judge:
    """A pytest plugin that narrows the run to the required tests and tells what became of them."""

    def __init__(self, tell, wanted):
        self.tell = tell
        self.wanted = set(wanted)
        self.before = fingerprint()
        self.manager = None
        self.plugins = ()
        self.file = None

    def check(self):
        now = fingerprint()
        changed = [".".join(k) for k, v in self.before.items() if now.get(k) != v]
        if self.manager is not None:
            changed += [str(p)[:80] for p in self.manager.get_plugins() if self.is_foreign(p)]
        if changed:
            self.tell("tampered", what=changed[:5])

    def is_foreign(self, plugin):
        """A plugin that came up during the run, and is neither pytest's own nor a conftest (those are ours)."""
        if plugin in self.plugins or os.path.basename(getattr(plugin, "__file__", None) or "") == "conftest.py":
            return False
        return not type(plugin).__module__.startswith("_pytest.")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session):
        self.manager = session.config.pluginmanager
        self.plugins = list(self.manager.get_plugins())

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if self.wanted:
            items[:] = [item for item in items if item.nodeid in self.wanted]

    def pytest_collection_finish(self, session):
        self.check()
        marked = [i.nodeid for i in session.items if i.get_closest_marker("xfail") is not None]
        self.tell("collected", ids=[i.nodeid for i in session.items], xfail=marked)

    def pytest_collectreport(self, report):
        if report.failed:
            self.tell("uncollectable", id=report.nodeid)

    def pytest_runtest_logstart(self, nodeid):
        if nodeid.split("::")[0] != self.file:
            self.file = nodeid.split("::")[0]
            self.check()
        self.tell("start", id=nodeid)

    def pytest_runtest_logreport(self, report):
        xfailed = hasattr(report, "wasxfail")
        self.tell("phase", id=report.nodeid, when=report.when, outcome=report.outcome, xfail=xfailed)

    def pytest_runtest_logfinish(self, nodeid):
        self.tell("finish", id=nodeid)


def main():
    fd = int(sys.stdin.buffer.readline())
    key = bytes.fromhex(sys.stdin.buffer.readline().decode())
    job = json.loads(sys.stdin.buffer.read().decode())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(fd, False)

    for name in WATCHED:
        try:
            import_module(name)
        except ImportError:  # not every pytest has every one of them
            continue
    judge = Judge(make_teller(fd, key), job["ids"])
    # From here on the repository's code can be imported: first in the path, after everything of ours is loaded.
    sys.path[:0] = job["roots"]
    os.environ["PYTHONPATH"] = os.pathsep.join(job["roots"])
    sys.argv[:] = ["pytest"]
    code = int(pytest.main(job["args"], plugins=[judge]))
    judge.check()
    judge.tell("end", code=code)
    os._exit(code)


if __name__ == "__main__":
    main()
