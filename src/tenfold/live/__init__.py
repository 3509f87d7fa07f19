"""Learning while serving: recent answers are kept, a head is trained on them aside, and goes live if it is better."""
