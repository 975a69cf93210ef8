"""One run on disk: train it, resume it, its directory, its record, its cost."""
