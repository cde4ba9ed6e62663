"""Reasoning of the scripted player: its current need, where the needed thing is, and what the action does."""

from collections.abc import Iterable

from envs.crafter.expert import SOURCE, Job, decide, find_job
from envs.crafter.vocabulary import describe
from envs.crafter.world.rules import KIND_NAMES
from envs.crafter.world.world import World

_NEEDS = {
    "sleep on": ("I am asleep until my energy is full.", ()),
    "fight": ("A foe stands next to me, so I fight.", ("zombie", "skeleton")),
    "guard": ("Animals would eat my plant, so I fence it in with stones.", ("plant",)),
    "cow": ("I have not eaten a cow yet.", ("cow",)),
    "place stone": ("I have not placed a stone yet, and carry one.", ()),
    "diamond": ("With an iron pickaxe I can dig a diamond.", ("diamond",)),
    "zombie": ("I am healthy and have not defeated a zombie yet.", ("zombie",)),
    "skeleton": ("I am healthy and have not defeated a skeleton yet.", ("skeleton",)),
}
"""Sentence and sought kinds of each goal."""


def explain(world: World) -> str:
    """Return the reasoning behind `advise(world)`: the need, where the needed thing is, and what the action does."""
    goal, action = decide(world)
    need, sought = _need(world, goal)
    return " ".join(part for part in (need, _seen(world, sought), _deed(world, action)) if part)


def _need(world: World, goal: str | None) -> tuple[str, Iterable[str]]:
    player = world.player
    amount = player.inventory
    if goal in ("Wood", "Stone", "Iron"):
        return _tool_need(world, find_job(world, goal))
    if goal == "drink":
        return f"My drink is {amount['drink']} of 9, so I look for water.", ("water",)
    if goal == "eat":
        return f"My food is {amount['food']} of 9, so I look for something to eat.", ("plant", "cow")
    if goal == "rest":
        tired = f"My energy is {amount['energy']} of 9 and my health {player.health} of 9"
        return f"{tired}{', and it is dark' if world.daylight < 0.5 else ''}: I need a safe rest.", ()
    if goal == "grow":
        if amount["sapling"]:
            return "I carry a sapling, which grows into food on grass.", ("grass",)
        return "I search grass for a sapling to plant.", ("grass",)
    if goal in ("wood", "stone"):
        return f"I carry {amount[goal]} {goal} and will need more.", (KIND_NAMES[SOURCE[goal]],)
    return _NEEDS.get(goal or "", ("There is nothing left to do.", ()))


def _tool_need(world: World, job: Job | None) -> tuple[str, Iterable[str]]:
    if job is None:
        return "", ()
    tool = job.making.name.replace("_", " ")
    if job.lacking is not None:
        have = world.player.inventory[job.lacking]
        purpose = f" and the {job.to_build[0].name} for it" if job.to_build else ""
        return f"For a {tool}{purpose} I lack {job.lacking}; I have {have}.", (KIND_NAMES[SOURCE[job.lacking]],)
    stations = [KIND_NAMES[station] for station in sorted(job.making.nearby)]
    if job.to_build:
        return f"I have what a {tool} takes, but need a {job.to_build[0].name} first.", stations
    return f"I have what a {tool} takes; it is made beside a {' and a '.join(stations)}.", stations


def _seen(world: World, sought: Iterable[str]) -> str:
    """Say where the first of the sought kinds is visible, in the observation's words, or that none is."""
    lines = describe(world)[0].splitlines()
    wanted = list(sought)
    for kind in wanted:
        for line in lines:
            if line.startswith(f"- {kind} "):
                return f"I see {line.removeprefix('- ').replace('your', 'my')}."
    return f"No {' or '.join(wanted)} is in sight." if wanted else ""


def _deed(world: World, action: str) -> str:
    verb, _, rest = action.lower().partition(" ")
    if verb == "move":
        return f"I turn {rest} and go that way."
    if verb == "do":
        facing = describe(world)[0].rpartition("You face ")[2].partition(" at your front")[0]
        return f"I act on the {facing} in front of me."
    if verb in ("place", "make"):
        return f"I {verb} {'an' if rest.startswith('iron') else 'a'} {rest}."
    return "I sleep." if verb == "sleep" else "I let this step pass."
