"""Keeps the agent's modules out of the Python processes that judge. Every Python of the tests' sandbox imports this.

An installed module (pytest, the standard library) imports installed modules only. The tests import installed modules
first, then those of the agent. The agent's own modules import what Python would give them, and a program of the agent
runs as if this file were not there. Old syntax and the standard library only, since any Python may run it.
"""

import atexit
import contextlib
import fcntl
import importlib.machinery
import io
import os
import sys

HERE, TESTS, REWARDS = os.path.dirname(os.path.abspath(__file__)), "/tests", "/logs/verifier/"
_ON_REQUEST = ("importlib/__init__.py", "importlib/util.py", "/runpy.py", "/pkgutil.py", "unittest/loader.py")
"""Modules that import what their caller names."""


def _read(name):
    with open(os.path.join(HERE, name), encoding="utf-8", errors="surrogateescape") as file:
        return [part for part in file.read().split("\0") if part]


PLACES, FIXED, PYTHON_PATH, SHIPPED = (_read(name) for name in ("places", "fixed", "python_path", "shipped"))
_known = {}
_dropped = []


def _is_in(path, folders):
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def is_agents(path):
    """Whether a file or folder lies where the agent could write; Python's own folders are mounted over such places."""
    try:
        path = os.path.join(os.getcwd(), path)
    except OSError:  # the current folder was removed
        return True
    if path not in _known:
        real = os.path.realpath(path)
        _known[path] = any(_is_in(part, PLACES) and not _is_in(part, FIXED) for part in (path, real))
    return _known[path]


def _is_copied_test(path):
    """Whether a file is a copy of one in the folder of the tests."""
    for folder, _, names in os.walk(TESTS):
        if os.path.basename(path) in names:
            with open(path, "rb") as one, open(os.path.join(folder, os.path.basename(path)), "rb") as other:
                if one.read() == other.read():
                    return True
    return False


class Finder(importlib.machinery.PathFinder):
    """Searches sys.path as far as the importing module may."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if path is not None:
            return super().find_spec(fullname, path, target)
        _drop_current_folder()
        agents = [folder for folder in sys.path if is_agents(folder)]
        installed = [folder for folder in sys.path if folder not in agents]
        importer = _importer()
        if importer == "agent":
            order = PYTHON_PATH + _fallback() + sys.path
        elif importer == "installed":
            order = installed
        else:
            order = installed + agents + PYTHON_PATH + _fallback()
        spec = super().find_spec(fullname, order, target)
        if spec is not None and spec.loader is None and spec.submodule_search_locations is not None:
            spec.submodule_search_locations = list(spec.submodule_search_locations)  # not searched again later
        if importer == "tests" and spec is not None and spec.origin and is_agents(spec.origin):
            _refuse_exit(spec.loader)
        return spec

    @classmethod
    def find_distributions(cls, *args, **kwargs):
        from importlib.metadata import DistributionFinder

        context = args[0] if args else kwargs.get("context", DistributionFinder.Context())
        path = [folder for folder in context.path if not is_agents(folder)]
        return super().find_distributions(DistributionFinder.Context(name=context.name, path=path))


def _refuse_exit(loader):
    """Make a module that ends the process while it is imported an error of the import."""
    execute = loader.exec_module

    def exec_module(module):
        try:
            execute(module)
        except SystemExit:
            raise ImportError(module.__name__ + " ends the process when it is imported") from None

    loader.exec_module = exec_module


def _drop_current_folder():
    """Take the agent's folder off sys.path where Python put it after this file ran: pytest also searches by itself."""
    if not _dropped and _main[:1] in ("", "-") and sys.path[:1] in ([""], [os.getcwd()]) and is_agents(sys.path[0]):
        _dropped.append(sys.path.pop(0))


def _fallback():
    """The current folder, as long as the script that is run is not one of the tests."""
    return [] if (sys.argv or [""])[0].startswith(TESTS + "/") else [os.getcwd()]


def _callers():
    """The files of the code that called us, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<frozen importlib") and file != __file__:
            yield file
        frame = frame.f_back


def _importer():
    """Whose code imports: "agent", "tests" (or somebody who was given the name), or "installed"."""
    for file in _callers():
        if file.startswith("<") or file.endswith(_ON_REQUEST) or "/multiprocessing/" in file:
            return "tests"
        if is_agents(file):
            return "agent"
        return "tests" if os.path.join(os.getcwd(), file).startswith(TESTS + "/") else "installed"
    return "tests"


def _is_called_by_agent():
    files = [file for file in _callers() if not file.startswith("<")]
    return any(is_agents(file) and file not in SHIPPED and not _is_copied_test(file) for file in files)


class Printed(io.FileIO):
    """Standard output that is the reward file: it remembers what this process wrote."""

    def __init__(self):
        super().__init__(1, "w", closefd=False)
        appends = fcntl.fcntl(1, fcntl.F_GETFL) & os.O_APPEND  # then the position is 0 until the first write
        self.start, self.told = os.lseek(1, 0, os.SEEK_END if appends else os.SEEK_CUR), b""
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(self), sys.stdout.encoding, sys.stdout.errors)

    def write(self, data):
        size = super().write(data)
        self.told += bytes(data)[:size]
        return size

    def restore(self):
        """Take away what other programs have written over it."""
        sys.stdout.flush()
        end = os.lseek(1, 0, os.SEEK_CUR)
        if end != self.start + len(self.told):  # programs of the tests have written, too
            os.ftruncate(1, end)
            return
        os.ftruncate(1, self.start)
        os.lseek(1, self.start, os.SEEK_SET)
        os.write(1, self.told)


class Judgement:
    """Tells the machine outside that this process judges, and later that it has come to its end.

    Rewards that programs under test wrote meanwhile are removed: the test script may not write another one.
    """

    def __init__(self):
        self.secret, self.pid = "", 0
        self.others = set(_processes())
        self.rewards = {}
        with contextlib.suppress(OSError):
            self.rewards = _rewards()
        own = [os.path.realpath("/proc/self/fd/" + fd).startswith(REWARDS + "reward.") for fd in "12"]
        self.writes = any(own)
        """Whether this process writes the reward, or has another of the tests write it."""
        self.printed = Printed() if own[0] else None

    def begin(self):
        if self.pid == os.getpid():
            return
        import hashlib

        self.secret, self.pid = os.urandom(16).hex(), os.getpid()
        self._say("begin " + hashlib.sha256(self.secret.encode()).hexdigest())

    def end(self):
        if self.pid == os.getpid():
            self.finish()
            self._say("end " + self.secret)

    def finish(self):
        """Leave neither processes nor rewards of the programs under test."""
        self.alone()
        if self.printed is not None:
            self.printed.restore()
        if self.writes:
            return
        try:
            for name, file in _rewards().items():
                if self.rewards.get(name) != file:
                    os.remove(REWARDS + name)
        except OSError:
            os.kill(os.getpid(), 9)

    def alone(self):
        """End the processes that were started since, so that none of them writes after us."""
        own, dead = set(_ancestors()), None
        while True:
            alive, known = _processes(), dead
            dead = {process for process, state in alive.items() if state in (b"Z", b"X")}
            left = [pid for pid, began in set(alive) - dead - self.others if pid not in own]
            if not left and dead == known:  # else somebody died meanwhile, perhaps after making a child we did not see
                break
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, 9)
        for output in ("/proc/self/fd/1", "/proc/self/fd/2"):
            if os.path.exists(output):
                place = os.readlink(output)
                if place.startswith(REWARDS) and place.endswith(" (deleted)"):
                    os.kill(os.getpid(), 9)  # somebody put another file in the place of ours

    def _say(self, text):
        try:
            pipe = os.open(os.path.join(HERE, "report"), os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, (text + "\n").encode())
            os.close(pipe)
        except OSError:
            os.kill(os.getpid(), 9)


def _rewards():
    """The reward files as they are now."""
    found = {}
    for name in os.listdir(REWARDS) if os.path.isdir(REWARDS) else ():
        if name.startswith("reward."):
            status = os.lstat(REWARDS + name)
            found[name] = (status.st_ino, status.st_ctime_ns)
    return found


def _stat(pid):
    """State, parent and start of a process."""
    with open("/proc/" + str(pid) + "/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    return words[0], int(words[1]), words[19]


def _processes():
    """The state of each process, by (pid, start)."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        state, began = b"gone", b""
        with contextlib.suppress(OSError):
            state, _, began = _stat(pid)
        found[(int(pid), began)] = state
    return found


def _ancestors():
    pid = os.getpid()
    while pid > 0:
        yield pid
        pid = _stat(pid)[1]


def _watch(event, args):
    """Refuse settings of pytest that the agent wrote, and notice its code and our rewards."""
    assert judgement is not None  # the hook is added with it
    if event == "exec":
        file = getattr(args[0], "co_filename", "")
        if file.startswith("<") or not is_agents(file):
            return
        if os.path.basename(file) == "conftest.py" and file not in SHIPPED and not _is_copied_test(file):
            raise ImportError(file + " was written by the agent")
        if _main in ("-c", "-", "") or _main.startswith(TESTS + "/") or "unittest.main" in sys.modules:
            judgement.begin()
    elif event == "open" and _is_reward(args[0]) and args[2] & (os.O_WRONLY | os.O_RDWR):
        if _is_called_by_agent():
            raise PermissionError("the tests write the reward")
        judgement.alone()
        judgement.writes = True
    elif event in ("os.rename", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"):
        named = any(place in repr(args[:2]) for place in (REWARDS, TESTS + "/")) or any(map(_is_reward, args[:2]))
        judgement.writes = judgement.writes or (named and not _is_called_by_agent())


def _is_reward(path):
    return isinstance(path, (str, bytes)) and os.path.abspath(os.fsdecode(path)).startswith(REWARDS + "reward.")


def _be_plain():
    """Leave no trace: this process is a program of the agent, and so are those that it starts."""
    sys.path[:] = PYTHON_PATH + [folder for folder in sys.path if folder != HERE]
    for name in ("PYTHONPATH", "PYTEST_PLUGINS", "BASH_ENV"):
        os.environ.pop(name, None)
    if PYTHON_PATH:
        os.environ["PYTHONPATH"] = ":".join(PYTHON_PATH)


_main = (getattr(sys, "argv", None) or ["-"])[0]
judgement = None
if _main and not _main.startswith("-") and is_agents(_main) and not _is_copied_test(_main):
    _be_plain()
else:
    judgement = Judgement()
    sys.meta_path[:] = [Finder if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
    if _main.startswith(TESTS + "/"):
        atexit.register(judgement.finish)
    atexit.register(judgement.end)  # registered first, so it runs after what the agent's code registers
    if hasattr(sys, "addaudithook"):
        sys.addaudithook(_watch)
