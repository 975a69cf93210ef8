"""Memory-saving versions of plain code, chosen by one switch: `Network.save_memory`. Everything else in networks/ is plain."""
