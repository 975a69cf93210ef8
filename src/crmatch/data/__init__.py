"""Data: files in, uint8 image sets with labels, splits and index batches out; knows no method."""
