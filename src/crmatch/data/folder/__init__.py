"""Your own pictures: scan a folder, decode, cache, and check before training."""
