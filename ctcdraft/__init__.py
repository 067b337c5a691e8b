"""CTC draft heads: train, export, measure and decode. The folders beside it are the package."""

__version__ = "0.1.0"
