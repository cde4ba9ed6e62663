"""How a game is played: live episodes, the slots that hold them, memory, warm-up, metrics."""
