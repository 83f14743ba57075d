"""How right the models of a run are, with intervals; answers that are kept to be read."""
