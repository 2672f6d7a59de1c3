"""Descant: many people fine-tune and sample their own adapters on one shared base model."""

__version__ = "0.1.0"
