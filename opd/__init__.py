"""Domain specialists by GRPO, merged into one model by multi-teacher on-policy distillation."""
