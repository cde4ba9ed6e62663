"""Messages and pictures to token ids, each message encoded once."""
