"""Pretrained models: loading, target layers, hooks and PEFT adapters."""
