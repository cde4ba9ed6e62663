"""Writes docs/images/episode.svg: one held-out episode before and after training, beside the learning curve.

python -m tests.write_animation outputs/quickstart      a finished run of the quickstart, from the repository's root

The picture is one SVG file, animated by CSS. It plays three times and ends on the last state. Readers who asked their
system for less motion see that state at once.
"""

import json
import math
import sys
import textwrap
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollout.spec import EnvSpec

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "episode.svg"
CELL = 36
READ_S, FAST_S, END_S, TRAIN_S, HOLD_S = 1.1, 0.08, 2.0, 4.0, 5.0
SLOW_TURNS = 4
"""Turns of the lost episode that are shown at reading speed; the others follow at `FAST_S`."""
WORLD, CHART = (24, 72), (376, 112, 312, 124)
BOX = (24, 376, 672, 116)
COLORS = {"red": "#ff6b6b", "green": "#51cf66", "blue": "#5c9dff", "purple": "#c792ea", "yellow": "#ffd43b"}
STYLE = """
text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; font-size: 24px; fill: #e8eef4 }
.dim { fill: #9fb0c0 } .good { fill: #4fd1b5 } .bad { fill: #ff8a80 } .big { font-size: 44px; font-weight: 700 }
.code { font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace } .bold { font-weight: 600 }
.show { animation: 1s step-end 3 both } .move { animation: 1s linear 3 both }
@media (prefers-reduced-motion: reduce) { .show, .move { animation: none !important } }
"""


@dataclass(frozen=True)
class State:
    """What is drawn between two turns."""

    x: int
    y: int
    heading: int
    """Quarter turns, not reduced, so that the shortest rotation leads to the next state."""


class Film:
    """Elements and the keyframes that show, hide and move them, on one clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.rules, self.body = seconds, [], []

    def percent(self, second: float) -> str:
        return f"{100 * second / self.seconds:.3f}%"

    def add(self, element: str) -> None:
        self.body.append(element)

    def animate(self, frames: list[tuple[float, str]], how: str = "show", rest: str = "") -> str:
        """Return the attributes that play the frames; `rest` is what a reader without motion sees."""
        name = f"k{len(self.rules)}"
        text = "".join(f"{self.percent(second)}{{{style}}}" for second, style in frames)
        self.rules.append(f"@keyframes {name}{{{text}}}")
        timing = f"animation-name:{name};animation-duration:{self.seconds:.2f}s"
        return f'class="{how}" style="{timing};{rest}"'

    def show(self, element: str, start: float, end: float) -> None:
        """Show an element from `start` to `end`; what lasts until the film's end is also its still picture."""
        last = end >= self.seconds
        frames = [(0.0, f"opacity:{int(start <= 0)}"), (start, "opacity:1")][start <= 0 :]
        frames += [(self.seconds, "opacity:1")] if last else [(end, "opacity:0"), (self.seconds, "opacity:0")]
        self.add(f"<g {self.animate(frames, rest='' if last else 'opacity:0')}>{element}</g>")


def replay(episode: dict[str, Any]) -> tuple[list[State], tuple[int, int, str, str], str]:
    """Play the recorded answers again; return the states, the object (x, y, kind, colour) and the mission."""
    env = EnvSpec(episode["env_path"], {"task": episode["task"], "seed": episode["seed"]}, episode["options"]).build()
    env.reset()
    game = env.game
    cells = [(x, y, game.grid.get(x, y)) for x in range(game.width) for y in range(game.height)]
    (thing,) = [(x, y, cell.type, cell.color) for x, y, cell in cells if cell and cell.type != "wall"]
    states = [State(*map(int, game.agent_pos), int(game.agent_dir))]
    for turn in episode["story"]:
        env.step(turn["response"])
        change = (int(game.agent_dir) - states[-1].heading + 1) % 4 - 1
        states.append(State(*map(int, game.agent_pos), states[-1].heading + change))
    return states, thing, game.mission


def choose(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a seed's episodes before and after training: first lost, then won with right thoughts in 7 to 10 turns."""
    lines = (run / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    seeds: dict[int, list[dict[str, Any]]] = {}
    for episode in map(json.loads, lines):
        seeds.setdefault(episode["seed"], []).append(episode)
    for episodes in seeds.values():
        before, after = episodes[0], episodes[-1]
        if before["success"] or not after["success"] or not 7 <= len(after["story"]) <= 10:
            continue
        _, (_, _, kind, color), _ = replay(after)
        if all(turn["valid"] and f"{color} {kind}" in turn["response"] for turn in after["story"]):
            return before, after
    raise SystemExit(f"{run} has no seed that was lost before training and won in 7 to 10 turns after it")


def place(state: State) -> str:
    x, y = ((value - 0.5) * CELL for value in (state.x, state.y))
    return f"transform:translate({x:g}px,{y:g}px) rotate({90 * state.heading}deg)"


def moves(states: list[State], times: list[float]) -> list[tuple[float, str]]:
    """Return frames in which the agent takes the first 45 % of a turn to move."""
    frames = [(times[0], place(states[0]))]
    for before, after, start, end in zip(states, states[1:], times, times[1:], strict=False):
        frames += [(start, place(before)), (start + 0.45 * (end - start), place(after)), (end, place(after))]
    return frames


def draw_thing(kind: str, color: str) -> str:
    fill = COLORS.get(color, "#adb5bd")
    shapes = {
        "ball": f'<circle r="12" fill="{fill}"/>',
        "box": f'<path d="M-11-11H11V11H-11zM-11 0H11" fill="none" stroke="{fill}" stroke-width="4"/>',
        "key": f'<path d="M0-2V12H6M0 6H5M-5-7a5 5 0 1 0 10 0a5 5 0 1 0-10 0" fill="none" stroke="{fill}" '
        'stroke-width="4"/>',
    }
    return shapes[kind]


def draw_world(film: Film, states: list[State], times: list[float], thing: tuple[int, int, str, str]) -> None:
    """Draw the room, the object to reach, and the agent that moves through `states`."""
    x, y, kind, color = thing
    lines = "".join(f"M{CELL * i} 0V{6 * CELL}M0 {CELL * i}H{6 * CELL}" for i in range(1, 6))
    film.add(f'<g transform="translate({WORLD[0] + 16},{WORLD[1] + 16}) scale(1.25)">')
    film.add(f'<rect x="-6" y="-6" width="{6 * CELL + 12}" height="{6 * CELL + 12}" rx="6" fill="#3d4d5c"/>')
    film.add(f'<rect width="{6 * CELL}" height="{6 * CELL}" fill="#0b1117"/><path d="{lines}" stroke="#1e2a35"/>')
    film.add(f'<g transform="translate({(x - 0.5) * CELL:g},{(y - 0.5) * CELL:g})">{draw_thing(kind, color)}</g>')
    agent = film.animate(moves(states, times), "move", place(states[-1]))
    film.add(f'<path d="M-11-11 13 0-11 11-6 0z" fill="#4fd1b5" {agent}/></g>')


def say(lines: list[str], kind: str) -> str:
    """Return the lines as text in the box below the world."""
    texts = (
        f'<text class="{kind}" x="{BOX[0] + 16}" y="{BOX[1] + 34 + 32 * i}">{escape(t)}</text>'
        for i, t in enumerate(lines)
    )
    return "".join(texts)


def draw_turns(film: Film, episode: dict[str, Any], times: list[float], readable: int) -> None:
    """Show each turn's number, reward and answer; after the `readable`-th turn, the answers are left out."""
    for number, turn in enumerate(episode["story"], 1):
        start, end = times[number - 1], times[number]
        reward = f'<tspan class="good bold">reward {turn["reward"]:+g}</tspan>' if turn["reward"] else "reward 0"
        place = f'x="{BOX[0] + BOX[2] - 16}" y="{BOX[1] + BOX[3] - 18}"'
        lines = f'<text class="dim" {place} text-anchor="end">turn {number} · {reward}</text>'
        if number <= readable:
            said = [part for line in turn["response"].split("\n") for part in textwrap.wrap(line, 44)]
            lines += say(said, "code")
        film.show(lines, start, end)
    if readable < len(episode["story"]):
        film.show(say(["… fast forward"], "dim"), times[readable], times[-1])


def draw_curve(film: Film, rows: list[dict[str, Any]], start: float, summary: dict[str, Any]) -> None:
    """Draw the reward per turn over the updates, as it grows during training, and the two held-out win rates."""
    left, top, width, height = CHART
    curve = [row["turn/reward"] for row in rows if "turn/reward" in row]
    peak = max(curve)
    points = [(left + width * i / (len(curve) - 1), top + height * (1 - value / peak)) for i, value in enumerate(curve)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    film.add(f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="#3d4d5c" stroke-width="2"/>')
    film.add(f'<text class="dim" x="{left}" y="{top - 12}">reward per turn</text>')
    film.add(
        f'<text class="dim" x="{left + width}" y="{top + height + 30}" text-anchor="end">{len(curve)} updates</text>'
    )
    end, last = start + TRAIN_S, film.seconds
    drawn = [0.0]
    for before, after in pairwise(points):
        drawn.append(drawn[-1] + math.dist(before, after))
    length = math.ceil(drawn[-1])
    for element, styles in (
        (
            f'<path d="{path}" stroke-dasharray="{length}" fill="none" stroke="#4fd1b5" stroke-width="4" ',
            [f"stroke-dashoffset:{length - done:.1f}" for done in drawn],
        ),
        ('<circle r="8" fill="#e8eef4" ', [f"transform:translate({x:.1f}px,{y:.1f}px)" for x, y in points]),
    ):
        steps = [(start + TRAIN_S * i / (len(styles) - 1), style) for i, style in enumerate(styles)]
        film.add(f"{element}{film.animate([(0, styles[0]), *steps, (last, styles[-1])], 'move', styles[-1])}/>")
    for when, color, shown in (("before", "bad", (0, start)), ("after", "good", (end, last))):
        won, turns = summary[f"win_rate_{when}"]["mean"], summary[f"turns_per_episode_{when}"]
        lines = f'<text x="{left}" y="318"><tspan class="big {color}">{100 * won:.0f} %</tspan> of games won</text>'
        film.show(f'{lines}<text x="{left}" y="354">{turns:.0f} turns per game</text>', *shown)


def draw(film: Film, run: Path, lost: dict[str, Any], won: dict[str, Any]) -> None:
    """Draw the lost episode, the training and the won episode."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (first, thing, mission), (second, _, _) = replay(lost), replay(won)
    before, after = turn_times(lost, won)
    ended, trained = before[-1] + END_S, after[0] - READ_S
    film.add(f'<text class="bold" x="24" y="46">Task: {escape(mission)}</text>')
    for label, color, start, end in (
        ("before PPO", "bad", 0.0, ended),
        ("PPO", "dim", ended, trained),
        ("after PPO", "good", trained, film.seconds),
    ):
        film.show(f'<text class="bold {color}" x="696" y="46" text-anchor="end">{label}</text>', start, end)
    draw_world(film, [*first, first[-1], second[0], *second], [*before, ended, ended, *after], thing)
    draw_curve(film, rows, ended, summary)
    film.add('<rect x="{}" y="{}" width="{}" height="{}" rx="10" fill="#0b1117"/>'.format(*BOX))
    draw_turns(film, lost, before, SLOW_TURNS)
    film.show(say([f"Time is up after {len(first) - 1} turns: lost."], "bad bold"), before[-1], ended)
    cost = f"in {summary['wall_time_s'] / 60:.0f} minutes on {summary['cpus']} CPU cores"
    film.show(say([f"PPO learns from {summary['turns']:,} turns,", cost], "dim"), ended, trained)
    draw_turns(film, won, [*after[:-1], film.seconds], len(second))


def turn_times(lost: dict[str, Any], won: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the seconds at which the states of the two episodes begin."""
    before = [0.0]
    for number in range(len(lost["story"])):
        before.append(before[-1] + (READ_S if number < SLOW_TURNS else FAST_S))
    start = before[-1] + END_S + TRAIN_S + READ_S
    return before, [start + READ_S * i for i in range(len(won["story"]) + 1)]


def write_animation(run: Path) -> None:
    """Write the animation of the run's first fitting seed."""
    lost, won = choose(run)
    film = Film(turn_times(lost, won)[1][-1] + HOLD_S)
    draw(film, run, lost, won)
    turns = len(lost["story"]), len(won["story"])
    said = f"Before PPO, the policy loses this game in {turns[0]} turns; after it, it wins in {turns[1]}."
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 508" role="img" aria-label="{said}">'
    rules = STYLE + "\n".join(film.rules)
    body = '<rect width="720" height="508" rx="16" fill="#141d26"/>' + "\n".join(film.body)
    IMAGE.write_text(f"{head}<style>{rules}</style>\n{body}</svg>\n", encoding="utf-8")
    print(f"{IMAGE}: seed {won['seed']}, {film.seconds:.0f} s, {IMAGE.stat().st_size / 1000:.0f} kB; {said}")


if __name__ == "__main__":
    write_animation(Path(sys.argv[1]))
