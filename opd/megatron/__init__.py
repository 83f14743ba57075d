"""Decoders on Megatron-Core: their form, layers, tensors and process groups, for teachers and students."""
