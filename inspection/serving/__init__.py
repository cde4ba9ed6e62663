"""The rooms of `slime-verlog serve-env`: what the frames hold, a session, the server."""
