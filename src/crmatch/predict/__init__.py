"""A finished model at work: load it, predict pictures, export it, suggest labels."""
