"""Models in other layouts, both ways: Hugging Face, Meta, DCP, torch.save."""
