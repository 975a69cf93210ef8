"""Augmentation: images in, the views that a method asks for out. All randomness is drawn first and applied afterwards."""
