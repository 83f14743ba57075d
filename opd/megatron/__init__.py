"""Decoders on Megatron-Core: form, layers, tensors and process groups, for teachers and students."""
