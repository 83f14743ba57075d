"""`opd plan`: a step's work from metadata alone, and a cluster that one does not have, simulated."""
