"""Benchmark sets from their makers: catalog, verified download, readers of the official archives."""
