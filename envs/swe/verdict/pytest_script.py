"""Runs pytest inside the sandbox and writes a report to a pipe: the outcomes of the required tests,
or what probes see.

Standard library and pytest only, and old syntax, because the repository's own Python runs it. Code
under test shares this process and can forge any line. Outcomes therefore count only on a tree whose
probes were right: a forger does not know the values that the lines of probes should hold.
"""

import gc
import json
import os
import pickle
import random
import sys
import types

import pytest
from encoding import MAX_MESSAGE, encode, loosely, names_of


def make_teller(fd):
    """A function that writes a record as one line to `fd`."""

    def tell(_dumps=json.dumps, _write=os.write, **record):
        line = _dumps(record).encode() + b"\n"
        while line:
            line = line[_write(fd, line) :]

    return tell


WORSE = ("passed", "xfailed", "skipped", "failed")


class Judge:
    """A pytest plugin that narrows the run to the required tests and notes what became of them."""

    def __init__(self, wanted):
        self.wanted = set(wanted)
        self.collected = []
        self.uncollectable = []
        self.outcomes = {}
        self.marked = set()
        """Tests that may fail, by a mark of theirs or of a conftest."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        self.collected = [item.nodeid for item in items]
        if self.wanted:
            items[:] = [item for item in items if item.nodeid in self.wanted]

    def pytest_collection_finish(self, session):
        # After the hooks of every conftest, which may add marks.
        self.marked = {
            item.nodeid for item in session.items if item.get_closest_marker("xfail") is not None
        }

    def pytest_collectreport(self, report):
        if report.failed:
            self.uncollectable.append(report.nodeid)

    def pytest_runtest_logreport(self, report):
        """Note the outcome of a test's call, or of a setup or teardown that went worse."""
        test = report.nodeid
        outcome = report.outcome
        if report.when == "call" or outcome != "passed":
            if outcome == "skipped" and hasattr(report, "wasxfail") and test in self.marked:
                outcome = "xfailed"
            self.outcomes[test] = max(self.outcomes.get(test, "passed"), outcome, key=WORSE.index)


class Raised:
    """What `with raises(...) as target` leaves in `target`, for pytest and unittest."""

    def __init__(self, error):
        self.value = self.exception = error
        self.type = type(error)
        self.tb = error.__traceback__

    def match(self, pattern):
        return True

    def __str__(self):
        return str(self.value)


class Prober:
    """A pytest plugin that narrows the run to the wanted tests, and gives them their `probe`."""

    def __init__(self, tell, job):
        self.tell = tell
        self.wanted = set(map(tuple, job["wanted"]))
        self.truths = set(job["truths"])
        self.values = set(job["values"])
        self.leaks = job["leaks"]
        self.held = None
        """Wanted values that the modules of the tests hold, once they are known."""
        self.keys = {}
        self.test = None
        self.states = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        counts = {}
        for item in items:
            name = item.nodeid.split("[", 1)[0]
            counts[name] = counts.get(name, -1) + 1
            self.keys[item.nodeid] = (name, counts[name])
        items[:] = [item for item in items if self.keys[item.nodeid] in self.wanted]

    def pytest_runtest_logstart(self, nodeid):
        self.test = self.keys.get(nodeid)
        self.states = generator_states()

    def probe(self, number, observed=None, expected=None):
        """Report what `observed` returns or raises, and pass it on; `expected` is there in the
        reference alone."""
        record = {"probe": number, "test": self.test}
        result = None
        frame = sys._getframe(1)
        if str(number) in self.leaks:
            if self.held is None:
                wanted = set().union(*self.leaks.values())
                self.held = reachable([vars(module) for module in test_modules().values()], wanted)
            wanted = set(self.leaks[str(number)])
            record["seen"] = sorted(
                (self.held & wanted) | reachable(frames_of_tests(frame), wanted - self.held)
            )
        if observed is not None:
            try:
                result = observed()
                if number in self.values:
                    record["value"] = encode(result)
                elif number in self.truths:
                    record["value"] = bool(result)
            except BaseException as error:
                record["raised"] = names_of(type(error)) + aliases(type(error), frame)
                record["message"] = encode(str(error)[:MAX_MESSAGE])
                result = Raised(error)
        record["drawn"] = any(
            self.states.get(name, now) != now for name, now in generator_states().items()
        )
        if expected is not None:
            record["expected"] = encode(expected())
        self.tell(**record)
        return result


def generator_states():
    """The states of the generators that most code draws from: another state means that something
    was drawn."""
    states = {"random": pickle.dumps(random.getstate())}
    if "numpy.random" in sys.modules:
        states["numpy"] = pickle.dumps(sys.modules["numpy.random"].get_state())
    return states


def aliases(kind, frame):
    """Names by which the test can call a class or what it inherits from, wherever they are
    defined."""
    found = []
    for name, value in [*frame.f_globals.items(), *frame.f_locals.items()]:
        if isinstance(value, types.ModuleType):
            known = [(name + "." + inner, one) for inner, one in list(vars(value).items())]
        else:
            known = [(name, value)]
        found += [
            text
            for text, one in known
            if isinstance(one, type) and one in kind.__mro__ and one is not object
        ]
    return found


MAX_OBJECTS = 20000
SKIPPED = ("_pytest", "pytest", "pluggy", "__main__")


def test_modules():
    """The modules of the tests and their helpers, by name."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if "probe" in vars(module) and name != "swe_probe"
    }


def frames_of_tests(frame):
    """Local variables and constants of the functions of the tests that are running."""
    found = []
    while frame is not None:
        if "probe" in frame.f_globals:
            found += [dict(frame.f_locals), frame.f_code]
        frame = frame.f_back
    return found


def reachable(waiting, wanted):
    """Those of the `wanted` values, as `loosely` writes them, that some object holds which can be
    reached from others.

    The search follows every reference but those into modules, other modules' classes and functions,
    and pytest. If it meets too many objects, all count as held.
    """
    if not wanted:
        return set()
    tests = test_modules()
    seen = set()
    kept = []
    found = set()
    foreign = {id(vars(module)) for module in list(sys.modules.values())}.difference(
        map(id, waiting)
    )
    texts = {text: json.loads(text) for text in wanted if text.startswith('"')}
    while waiting and len(found) < len(wanted):
        value = waiting.pop()
        if id(value) in seen or id(value) in foreign or is_foreign(value, tests):
            continue
        seen.add(id(value))
        kept.append(value)  # so that no other object gets its id
        if len(seen) > MAX_OBJECTS:
            return set(wanted)
        if isinstance(value, PLAIN):
            found.update({loosely(encode(value))}.intersection(wanted))
            if isinstance(value, str):
                found.update(text for text, inner in texts.items() if inner in value)
        elif isinstance(value, types.CodeType):
            waiting += value.co_consts
        waiting += gc.get_referents(value)
    return found


PLAIN = (bool, int, float, complex, str, bytes, tuple, list, set, frozenset, dict)


def is_foreign(value, tests):
    """Whether an object belongs to pytest, or is a module, class or function that no test module
    defines."""
    if isinstance(value, (types.ModuleType, types.FrameType)):
        return True
    if isinstance(value, (type, types.FunctionType)):
        return value.__module__ not in tests
    return str(type(value).__module__).split(".")[0] in SKIPPED


def main():
    fd = int(sys.stdin.buffer.readline())
    job = json.loads(sys.stdin.buffer.read().decode())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(fd, False)
    tell = make_teller(fd)
    if "ids" in job:
        plugin = Judge(job["ids"])
    else:
        plugin = Prober(tell, job)
        sys.modules["swe_probe"] = types.ModuleType("swe_probe")
        vars(sys.modules["swe_probe"])["probe"] = plugin.probe
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    del sys.modules["encoding"]  # the repository may have a module of this name
    # From here on the repository's code can be imported: first in the path, after everything of
    # ours is loaded.
    sys.path[:0] = job["roots"]
    os.environ["PYTHONPATH"] = os.pathsep.join(job["roots"])
    sys.argv[:] = ["pytest"]
    code = int(pytest.main(job["args"], plugins=[plugin]))
    if isinstance(plugin, Judge):
        tell(
            code=code,
            collected=plugin.collected,
            uncollectable=plugin.uncollectable,
            outcomes=plugin.outcomes,
        )
    os._exit(code)


if __name__ == "__main__":
    main()
