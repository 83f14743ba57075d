"""Sources of prompts: procedural tasks, files, optional libraries. Importable without torch."""
