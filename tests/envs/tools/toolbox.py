"""Tools for tests: good ones, and every kind that misbehaves."""

import asyncio
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np

from envs.errors import EnvironmentFault
from envs.tools import Tool, ToolEpisode, tool

release = threading.Event()
"""Lets the calls of `misbehave("hang")` and of blocking async tools end, so that a test leaves no
thread behind."""


@tool
def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


@tool(name="paint")
def make_picture(colour: Literal["red", "blue"]) -> Any:
    """Paint a picture in one colour.

    Args:
        colour: The colour.
    """
    pixels = np.zeros((28, 28, 3), dtype=np.uint8)
    pixels[..., 0 if colour == "red" else 2] = 255
    return {"text": f"all {colour}", "image": pixels}


@tool
def pay(amount: float) -> tuple[dict[str, float], float, dict[str, float]]:
    """Pay an amount.

    Args:
        amount: How much.
    """
    return {"paid": amount}, amount, {"amount": amount}


@tool
async def later(word: str) -> str:
    """Say a word after a moment.

    Args:
        word: The word.
    """
    await asyncio.sleep(0.01)
    return word.upper()


@tool
def misbehave(how: str) -> Any:
    """Go wrong.

    Args:
        how: In which way.
    """
    match how:
        case "raise":
            raise ValueError("no luck")
        case "timeout":
            raise TimeoutError("the server is asleep")
        case "hang":
            release.wait(60)
        case "broken picture":
            return {"image": b"no picture"}
        case "object":
            return object()
        case "machine":
            raise EnvironmentFault("the disk is full")
    return None


@tool
async def hang_async(block: bool) -> str:
    """Never end, awaiting or blocking.

    Args:
        block: Whether to block the loop.
    """
    if block:
        release.wait(60)
    await asyncio.sleep(60)
    return "never"


class Counter(Tool):
    """Counts its calls; its log file says what was done with it."""

    def create(self, episode: ToolEpisode) -> str | None:
        self.count = 0
        self._note("create")
        if self.config.get("fail_create"):
            raise RuntimeError("no counter left")
        return self.config.get("greeting")

    def execute(self, step: int = 1) -> str:
        """Count on.

        Args:
            step: How far.
        """
        self.count += step
        self._note("execute")
        return f"count {self.count}"

    def calc_reward(self) -> float:
        return self.count / 10

    def release(self) -> None:
        self._note("release")

    def _note(self, what: str) -> None:
        if "log" in self.config:
            with open(Path(self.config["log"]), "a", encoding="utf-8") as file:
                file.write(what + "\n")
