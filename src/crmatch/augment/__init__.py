"""Augmentation: images in, the views a method asked for out; every draw is made first and applied afterwards."""
