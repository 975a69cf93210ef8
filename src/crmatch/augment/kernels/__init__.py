"""Batched image operations on uint8 tensors, equal to Pillow's pixel by pixel."""
