"""Where prompts come from: procedural tasks, files, optional libraries. Importable without torch."""
