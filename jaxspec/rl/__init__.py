"""The reinforcement-learning step and its parts."""
