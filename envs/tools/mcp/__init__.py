"""Tools of MCP servers: settings, the connection to a server, and the tools that it offers."""
