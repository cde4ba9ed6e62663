"""Messages and images to token ids, each message encoded once."""
