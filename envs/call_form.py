"""How a checkpoint's chat template writes a tool call, and the patterns that find one."""

import re
from dataclasses import dataclass
from functools import cached_property

_NAME = r"(?P<name>[^\s<>{}\[\]\"'|]+?)"


@dataclass(frozen=True)
class CallForm:
    """Fixed texts around a call's name and arguments. White space in them is optional."""

    opener: str
    """Before the name."""
    after_name: str
    """Between the name and the arguments, or what closes the call. Numbers in it may be others."""
    closer: str
    key: str = ""
    """Before an argument's name; empty if the arguments are one JSON object."""
    value: str = ""
    """Between an argument's name and its value."""
    value_end: str = ""
    section: tuple[str, str] = ("", "")
    """Around all calls of a response."""

    @property
    def shape(self) -> str:
        """The form, for error messages."""
        inside = f"{self.key}argument{self.value}value{self.value_end}" if self.key else "{...}"
        return re.sub(r"\s+", "", f"{self.opener}name{self.after_name}{inside}{self.closer}")

    @cached_property
    def starts(self) -> re.Pattern[str]:
        """What begins a call, with what begins all calls if it is there."""
        section = loose(self.section[0])
        return re.compile((rf"(?:{section}\s*)?" if section else "") + loose(self.opener))

    @cached_property
    def head(self) -> re.Pattern[str]:
        """Everything before the arguments."""
        end = loose(self.after_name) or r"(?=\s|<|\Z)"
        return re.compile(rf"{self.starts.pattern}\s*{_NAME}\s*{re.sub(r'[0-9]+', r'[0-9]+', end)}")

    @cached_property
    def ends(self) -> re.Pattern[str]:
        """The first tag that closes the call."""
        first = re.match(r"\s*(<[^<>]*>|\S+)", self.closer)
        return re.compile(rf"\s*{re.escape(first[1])}" if first else r"\s*(?=<|\Z)")

    @cached_property
    def pair(self) -> re.Pattern[str]:
        """An argument's name and what precedes its value."""
        return re.compile(rf"\s*{loose(self.key)}\s*(?P<key>[^<>\n]+?)\s*{loose(self.value)}")

    @cached_property
    def pair_end(self) -> re.Pattern[str]:
        """What closes a value: the fixed text where another argument or the end of the call
        follows."""
        following = rf"\s*{loose(self.key)}|{self.ends.pattern}"
        return re.compile(rf"{loose(self.value_end)}(?={following})")


def loose(text: str) -> str:
    """Return a pattern of the text in which white space is optional, also between tags."""
    return r"\s*".join(map(re.escape, text.replace("><", "> <").split()))


MARKUP = CallForm(
    "<tool_call>\n<function=",
    ">",
    "</function>\n</tool_call>",
    "<parameter=",
    ">\n",
    "\n</parameter>",
)
"""Read without a template too, because servers return it as text."""
