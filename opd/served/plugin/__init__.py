"""Put this folder on the PYTHONPATH of an SGLang server, see `opd_hidden_states`."""
