"""One run on several processes: process group and synchronized batch norm."""
