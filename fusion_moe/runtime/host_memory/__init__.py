"""Memory of the host: large pages, NUMA nodes, how fast it is read."""
