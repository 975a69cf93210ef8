"""The paper's tables: as data, as runs at any scale, and as filled tables in several formats."""
