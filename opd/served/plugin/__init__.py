"""Put on the PYTHONPATH of an SGLang server as a folder of its own; see `opd_hidden_states`."""
