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


class Judge:
    """A pytest plugin that narrows the run to the required tests and tells what became of them."""

    def __init__(self, tell, wanted):
        self.tell = tell
        self.wanted = set(wanted)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if self.wanted:
            items[:] = [item for item in items if item.nodeid in self.wanted]

    def pytest_collection_finish(self, session):
        marked = [i.nodeid for i in session.items if i.get_closest_marker("xfail") is not None]
        self.tell("collected", ids=[i.nodeid for i in session.items], xfail=marked)

    def pytest_collectreport(self, report):
        if report.failed:
            self.tell("uncollectable", id=report.nodeid)

    def pytest_runtest_logstart(self, nodeid):
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

    judge = Judge(make_teller(fd, key), job["ids"])
    # From here on the repository's code can be imported: first in the path, after everything of ours is loaded.
    sys.path[:0] = job["roots"]
    os.environ["PYTHONPATH"] = os.pathsep.join(job["roots"])
    sys.argv[:] = ["pytest"]
    code = int(pytest.main(job["args"], plugins=[judge]))
    judge.tell("end", code=code)
    os._exit(code)


if __name__ == "__main__":
    main()
