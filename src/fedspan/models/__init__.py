"""Pretrained models: loading, target layers, the hooks, PEFT's adapters."""
