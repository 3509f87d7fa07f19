"""Finding out what makes a team's own traffic fast on its machine."""
