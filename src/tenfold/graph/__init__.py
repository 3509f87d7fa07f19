"""A model as data: ops, the graph, what it costs, and passes over it."""
