"""The student's training step: packing, loss terms, the torch back end. See README.md for the map."""
