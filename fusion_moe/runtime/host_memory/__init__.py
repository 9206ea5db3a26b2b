"""Memory of the host: large pages, how fast it is read."""
