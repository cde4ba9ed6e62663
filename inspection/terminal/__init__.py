"""The rooms of `slime-verlog play`: the game, the dialogue with the person, pictures in a terminal."""
