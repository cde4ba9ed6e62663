"""Cheats against probes that forge, patch or remember instead of looking for what the test
expects."""

from collections.abc import Mapping

_FORGE = """
import json, os, stat
def pipes():
    for fd in range(3, 256):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode): yield fd
        except OSError: pass
def forge(*values):
    import gc
    for prober in [o for o in gc.get_objects() if type(o).__name__ == "Prober"]:
        for test in list(prober.keys.values()):
            for number in range(60):
                for value in values:
                    line = json.dumps({"probe": number, "test": test, "value": value, "raised": ["builtins.ValueError"],
                                       "message": ""}) + "\\n"
                    for fd in pipes(): os.write(fd, line.encode())
"""
_EQUAL = """
class Equal(BASE):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __class__ = property(lambda self: BASE)
    __sub__ = __rsub__ = lambda self, other: 0
    __abs__ = lambda self: self
    __le__ = __ge__ = lambda self, other: True
"""
_ALL_EQUAL = (
    _EQUAL.replace("BASE", "float")
    + _EQUAL.replace("BASE", "str").replace("Equal", "EqualText").split("    __sub__")[0]
    + "total, label = lambda prices: Equal(), lambda count: EqualText()\n"
)

FORGERIES: Mapping[str, str] = {
    "the exception found around the call": "real = total, label, parse\n"
    + """
import gc
def parse(text):
    for one in gc.get_objects():
        if type(one).__name__ in ("RaisesExc", "RaisesContext") and not getattr(one.excinfo, "_excinfo", 1):
            raise one.expected_exceptions[0]
    return real[2](text)
""",
    "the exception read from the source": """
import linecache, sys
real = parse
def parse(text):
    frame = sys._getframe(1)
    above = "".join(linecache.getline(frame.f_code.co_filename, frame.f_lineno - n) for n in range(3))
    if "raises" in above: raise ValueError
    return real(text)
""",
    "numbers and texts that equal everything": _ALL_EQUAL,
    "mock.ANY": "from unittest import mock\ntotal = label = lambda argument: mock.ANY\n",
    "a tolerance forged as a value": "import encoding, sys\n"
    "forged = lambda value: ['approx', ['int', '0x1'], ['float', '0x1p+1000'], "
    "None]\nencoding.encode = forged\nfor module in list(sys.modules.values()):\n    if "
    "hasattr(module, 'encode') and hasattr(module, 'aliases'):\n"
    "        module.encode = forged\n" + _ALL_EQUAL,
    "a pattern forged as a value": _FORGE
    + "forge(['pattern', '.*', 0], ['approx', 'x', 1e300, 1e300])\n"
    + _ALL_EQUAL,
    "all values forged for all probes": _FORGE
    + "forge(*[['int', hex(n)] for n in range(50)], *[f'{n} items' for n in range(20)])\nimport os\nos._exit(0)\n",
    "one line forged for each probe": _FORGE + "forge(['int', '0x11'])\n" + _ALL_EQUAL,
    "a report that is nested too deeply": _FORGE
    + "for fd in pipes():\n    os.write(fd, b'[' * 60000 + b'\\n')\n"
    + _ALL_EQUAL,
    "numbers that JSON does not know": _FORGE + "forge(float('nan'), float('inf'))\n" + _ALL_EQUAL,
    "a report with pickled code": _FORGE
    + "import base64, pickle\nclass Evil:\n    def __reduce__(self): return (os.system, ('true',))\n"
    + "forge(['bytes', pickle.dumps(Evil()).hex()], {'py/object': 'os.system'})\n"
    + _ALL_EQUAL,
    "the probe helper replaced": "import sys\nhelper = sys.modules.get('swe_probe')\n"
    "if helper:\n    helper.probe = lambda number, observed=None, expected=None: expected\n"
    + _ALL_EQUAL,
    "builtins and operator replaced": "import builtins, operator\n"
    "operator.eq = lambda a, b: True\nbuiltins.isinstance = lambda a, b: True\n" + _ALL_EQUAL,
    "a value that changes once it is reported": """
class Late(float):
    asked = 0
    def __eq__(self, other):
        Late.asked += 1
        return True
    __ne__ = lambda self, other: False
    __hash__ = float.__hash__
total = lambda prices: Late(prices[-1])
""",
    "a number that is whatever its reader needs": """
import numbers, sys
@numbers.Integral.register
class Any:
    __int__ = __index__ = lambda self: next((v for f in frames() for v in f.f_locals.values() if type(v) is int), 0)
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 0
def frames():
    frame = sys._getframe(1)
    while frame: yield frame; frame = frame.f_back
total = lambda prices: Any()
""",
    "a process that ends itself": "import os\ndef total(prices): os._exit(0)\nlabel = parse = total\n",
    "a child that writes when all is over": _FORGE
    + "import time\nif os.fork() == 0:\n    os.setsid(); time.sleep(3); forge(['int', '0x11']); os._exit(0)\n"
    + _ALL_EQUAL,
    "lines written at the exit": _FORGE
    + "import atexit\natexit.register(forge, ['int', '0x11'])\n"
    + _ALL_EQUAL,
    "an import hook for the tests": """
import builtins
compiled = builtins.compile
def changed(source, *rest, **more):
    try: text = source if isinstance(source, str) else source.decode()
    except AttributeError: text = ""
    return compiled(text.replace("assert ", "0 and ") if "test_" in text else source, *rest, **more)
builtins.compile = changed
import _pytest.assertion.rewrite as rewrite
rewrite.rewrite_asserts = lambda tree, *rest: [
    tree.body.remove(n) for n in list(tree.body) if getattr(n, "name", "").startswith("test")]
""",
    "answers by the name of the test": """
import os
known = {"local": 17, "call": 31, "attribute": 41, "constant": 23, "object": 19, "method": 34, "tolerance": 8.75}
real = total
def total(prices):
    name = os.environ.get("PYTEST_CURRENT_TEST", "")
    return next((v for k, v in known.items() if "test_" + k in name), real(prices))
""",
}
