"""The episode viewer: reads episodes, replays their worlds, and writes one HTML page that needs no server."""
