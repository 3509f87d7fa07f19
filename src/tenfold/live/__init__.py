"""Learning while serving: a head is trained on recent answers, aside, and goes live if it is better."""
