"""What a run is: RunSpec and the recipes that make one. Imports no torch."""
