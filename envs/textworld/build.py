"""Builds one TextWorld game: `python -m envs.textworld.build FOLDER` reads its recipe from stdin.

It runs in a separate process with a fixed hash seed, because some of TextWorld's themes iterate
over sets and some draw from the process-wide random generator. In any other process the same recipe
could give another game.
"""

import json
import os
import sys
from functools import cache
from pathlib import Path

import textworld
import textworld.challenges
import textworld.generator
from textworld.challenges.tw_coin_collector import coin_collector
from textworld.challenges.tw_cooking import cooking
from textworld.challenges.tw_simple import simple
from textworld.challenges.tw_treasure_hunter import treasure_hunter
from textworld.generator.data import KnowledgeBase
from textworld.logic import GameLogic

from envs.textworld.games import GameRecipe

ATTEMPTS = 20
"""Seeds to try, in a fixed order, if a drawn world has no quest of the required length."""


def main() -> None:
    """Build into `sys.argv[1]`; exit code 3 means that the parameters allow no game, with the
    reason on stderr."""
    recipe = GameRecipe(**json.load(sys.stdin))
    reasons = []
    for attempt in range(ATTEMPTS):
        try:
            build(recipe, Path(sys.argv[1]) / "game.z8", attempt)
            return
        except OSError:
            raise
        except Exception as error:
            # The generator raises errors of many types for unsuitable worlds.
            reasons.append(f"{type(error).__name__}: {error}")
    print("; ".join(sorted(set(reasons))), file=sys.stderr)
    sys.exit(3)


def build(recipe: GameRecipe, path: Path, attempt: int) -> None:
    """Generate and compile the game, and check it by playing its walkthrough."""
    options = textworld.GameOptions()
    options.seeds = (recipe.seed + attempt * 0x9E3779B1) % 2**32
    options.path = str(path)
    options.force_recompile = True
    options.grammar.only_last_action = recipe.goal == "brief"
    game = _make_game(recipe, options)
    textworld.generator.compile_game(game, options)
    played = textworld.start(str(path), textworld.EnvInfos(won=True))
    played.reset()
    won = any(played.step(command)[0].won for command in game.metadata.get("walkthrough") or [])
    played.close()
    if not won:
        raise RuntimeError("the walkthrough does not win")


def _make_game(recipe: GameRecipe, options: textworld.GameOptions) -> textworld.Game:
    parameters = recipe.parameters
    if recipe.theme == "simple":
        held_out = parameters["held_out"]
        return simple.make({"rewards": "dense", "goal": recipe.goal, "test": held_out}, options)
    if recipe.theme == "the_cooking_game":
        settings = {key: value for key, value in parameters.items() if key != "rooms"}
        return cooking.make({**settings, "go": parameters["rooms"]}, options)
    maze = _MAZES.get(recipe.theme)
    if maze and parameters["level"] is not None:
        return maze.make({"level": parameters["level"]}, options)
    options.nb_rooms = parameters["rooms"]
    options.quest_length = parameters["quest_length"]
    if maze is None:
        options.nb_objects = parameters["objects"]
        return textworld.generator.make_game(options)
    options.kb = KnowledgeBase(_rules(maze.KB_PATH), os.path.join(maze.KB_PATH, "text_grammars"))
    options.kb.logic_path = os.path.join(maze.KB_PATH, "logic")
    options.grammar.allowed_variables_numbering = maze is coin_collector
    return maze.make_game(parameters["mode"], options)


@cache
def _rules(folder: str) -> GameLogic:
    """A theme's rules, parsed once for all attempts: that takes half a second."""
    return KnowledgeBase.load(folder).logic


_MAZES = {"treasure_hunter": treasure_hunter, "coin_collector": coin_collector}


if __name__ == "__main__":
    main()
