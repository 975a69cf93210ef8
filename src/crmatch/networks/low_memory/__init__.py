"""Memory-saving versions of a block; the only place in networks/ that is not plain."""
