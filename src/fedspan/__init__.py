"""fedspan: federated fine-tuning of pretrained models with low-rank updates."""

__version__ = "0.1.0"
