"""Where everything is wired: command line, run folder, stages and report. Nothing imports it."""
